"""A choice's tokens come out by index, once, however the runs arrive."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.orchestration.choices import ChoiceProgress
from transfer.wire import pack_ints
from worker.token_runs import FinishReason, TokenLogprob, TokenRun

OUTPUT = tuple(range(100, 120))


def make_run(start: int, end: int, *, finish: FinishReason | None = None) -> TokenRun:
    return TokenRun(
        request_id="r",
        choice=0,
        start=start,
        tokens=pack_ints(OUTPUT[start:end]),
        logprobs=tuple(TokenLogprob(logprob=-float(i)) for i in range(start, end)),
        finish=finish,
    )


@given(st.data())
def test_any_covering_set_of_runs_gives_every_token_once(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(OUTPUT)))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    edges = [0, *cuts, length]
    pairs = list(pairwise(edges))
    extra = data.draw(
        st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=6)
    )
    pairs += [(min(pair), max(pair)) for pair in extra]
    pairs = data.draw(st.permutations(pairs))
    progress = ChoiceProgress(0)
    tokens: list[int] = []
    logprobs: list[float] = []
    for start, end in pairs:
        effect = progress.accept(make_run(start, end, finish="length" if end == length else None))
        assert effect.conflict_index is None
        if effect.delta is not None:
            assert effect.delta.index == len(tokens)
            tokens.extend(effect.delta.tokens)
            logprobs.extend(entry.logprob for entry in effect.delta.logprobs)
    assert tuple(tokens) == OUTPUT[:length]
    assert logprobs == [-float(i) for i in range(length)]
    assert progress.finish == "length"
    assert progress.completion_tokens == length


def test_a_repetition_is_dropped_and_a_contradiction_is_told() -> None:
    progress = ChoiceProgress(0)
    progress.accept(make_run(0, 2))
    assert progress.accept(make_run(0, 2)).delta is None
    wrong = make_run(1, 3)._replace(tokens=pack_ints((7, 8)))
    effect = progress.accept(wrong)
    assert effect.conflict_index == 1
    assert progress.tokens[:2] == [100, 101]


def test_runs_ahead_of_a_gap_wait_and_can_be_dropped() -> None:
    progress = ChoiceProgress(0)
    assert progress.accept(make_run(2, 4)).delta is None
    progress.drop_ahead()
    effect = progress.accept(make_run(0, 2))
    assert effect.delta is not None
    assert effect.delta.tokens == OUTPUT[:2]


def test_the_end_may_come_with_a_repetition_or_alone() -> None:
    repeated = ChoiceProgress(0)
    repeated.accept(make_run(0, 1))
    repeated.accept(make_run(0, 1, finish="stop"))
    assert repeated.finish == "stop"
    alone = ChoiceProgress(0)
    alone.accept(make_run(0, 1))
    alone.accept(make_run(1, 1, finish="stop"))
    assert alone.finish == "stop"
    assert alone.completion_tokens == 1


def test_nothing_counts_after_a_stop() -> None:
    progress = ChoiceProgress(0)
    progress.accept(make_run(0, 5))
    assert progress.stop(3)
    assert not progress.stop(4)
    assert progress.accept(make_run(5, 6)).delta is None
    assert progress.completion_tokens == 3
    assert progress.finish == "stop"
