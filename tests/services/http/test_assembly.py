"""Text, tokens and counts of a choice do not depend on how its tokens were split into events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.assembly import ChoiceDelta, ChoiceText, InconsistentEvents, PromptText, TextRule
from services.orchestration.api import ChoiceFinished, FinishReason, TokenDelta, TokenLogprob
from services.text.detokenizer import Detokenizer, decode
from services.text.stop_strings import StopStrings
from services.text.vocabulary import Vocabulary
from tests.support.tiny_tokenizers import EOS, byte_level_tokenizer, token_id

RAW = byte_level_tokenizer()
VOCABULARY = Vocabulary(RAW)
EOS_ID = token_id(RAW, EOS)
SMALL = [
    token_id(RAW, token)
    for token in ("a", "b", "\u0120stop", "the", "\u00f0\u0141\u013a", "\u0122")
]


def rule(
    stops: list[str], *, stop_token_ids: tuple[int, ...] = (), min_tokens: int = 0
) -> TextRule:
    return TextRule(StopStrings(stops), frozenset(stop_token_ids), min_tokens)


def run(
    tokens: list[int], cuts: list[int], text_rule: TextRule, reason: FinishReason = "length"
) -> tuple[ChoiceText, list[ChoiceDelta]]:
    """Feed ``tokens`` in events that end at ``cuts``."""
    choice = ChoiceText(0, Detokenizer.of_text(VOCABULARY), text_rule)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    deltas: list[ChoiceDelta | None] = []
    start = 0
    for end in ends:
        part = tuple(tokens[start:end])
        logprobs = tuple(TokenLogprob(logprob=-float(token)) for token in part)
        deltas.append(choice.push(TokenDelta(0, start, part, logprobs)))
        start = end
    deltas.append(choice.finish(reason))
    return choice, [delta for delta in deltas if delta is not None]


def naive(tokens: list[int], stops: list[str]) -> tuple[str, int, str]:
    """Text, count and finish reason by decoding everything again for every token."""
    for count in range(1, len(tokens) + 1):
        text = decode(VOCABULARY, tokens[:count])
        if count < len(tokens):
            text = text.removesuffix("\ufffd")  # may be an unfinished character
        hits = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if text.find(stop) >= 0]
        if hits:
            end, length = min(hits)
            return text[: end + length], count, "stop"
    return decode(VOCABULARY, tokens), len(tokens), "length"


@given(
    st.lists(st.sampled_from(SMALL), min_size=1, max_size=25),
    st.lists(st.integers(0, 25), max_size=8),
    st.lists(st.text("ab\U0001f600 stohe", min_size=1, max_size=4), max_size=3),
)
def test_any_split_gives_the_naive_cut(
    tokens: list[int], cuts: list[int], stops: list[str]
) -> None:
    choice, deltas = run(tokens, cuts, rule(stops))
    text, count, reason = naive(tokens, stops)
    assert "".join(delta.text for delta in deltas) == text
    assert choice.completion_tokens == count
    shown = [token for delta in deltas for token in delta.tokens]
    assert [token.token_id for token in shown] == tokens[:count]
    assert [token.logprob.logprob for token in shown if token.logprob] == [
        -t for t in tokens[:count]
    ]
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
    assert deltas[-1].stop_index in (None, count)
    assert all(delta.text for delta in deltas[:-1])


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5]])
def test_the_stop_index_is_behind_the_token_that_completed_the_stop_string(cuts: list[int]) -> None:
    tokens = [SMALL[0], SMALL[1], SMALL[3], SMALL[2], SMALL[0]]
    choice, deltas = run(tokens, cuts, rule(["the"]))
    assert deltas[-1].stop_index == choice.completion_tokens == 3


def test_a_token_that_ends_the_choice_counts_but_does_not_show() -> None:
    for stop_id in (EOS_ID, SMALL[0]):
        choice, deltas = run([SMALL[1], stop_id], [1], rule([], stop_token_ids=(stop_id,)), "stop")
        assert [delta.text for delta in deltas] == ["b", ""]
        assert choice.completion_tokens == 2
        assert [token.token_id for delta in deltas for token in delta.tokens] == [SMALL[1], stop_id]


def test_an_end_of_sequence_at_once_gives_an_empty_answer() -> None:
    choice, deltas = run([EOS_ID], [], rule([], stop_token_ids=(EOS_ID,)), "stop")
    assert [(delta.text, delta.finish) for delta in deltas] == [("", "stop")]
    assert choice.completion_tokens == 1


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = [SMALL[0]] * 5
    for minimum, expected in ((0, ""), (1, "a"), (3, "aaa"), (9, "aaaaa")):
        _, deltas = run(tokens, [1, 2, 3, 4], rule(["a"], min_tokens=minimum))
        assert "".join(delta.text for delta in deltas) == expected


def test_offsets_count_characters_of_the_text_before() -> None:
    ids = RAW.encode("a\U0001f600b", add_special_tokens=False).ids
    _, deltas = run(ids, [], rule([]))
    offsets = [token.text_offset for delta in deltas for token in delta.tokens]
    assert offsets == [0, 1, 1, 2]


def test_tokens_out_of_order_are_a_bug_and_late_ones_are_not() -> None:
    choice = ChoiceText(0, Detokenizer.of_text(VOCABULARY), rule(["b"]))
    with pytest.raises(InconsistentEvents, match="expected output index 0, got 1"):
        choice.push(TokenDelta(0, 1, (SMALL[0],)))
    choice.push(TokenDelta(0, 0, (SMALL[1],)))
    assert choice.is_finished
    assert choice.push(TokenDelta(0, 1, (SMALL[0],))) is None
    assert choice.finish("length") is None
    assert choice.completion_tokens == 1


def test_choices_of_a_prompt_do_not_mix() -> None:
    choices = tuple(ChoiceText(at, Detokenizer.of_text(VOCABULARY), rule([])) for at in range(2))
    prompt = PromptText(choices)
    first = SMALL[4]
    assert prompt.handle(TokenDelta(0, 0, (first,))) is None
    shown = prompt.handle(TokenDelta(1, 0, (SMALL[0],)))
    assert shown is not None
    assert (shown.choice, shown.text) == (1, "a")
    prompt.handle(ChoiceFinished(1, "stop"))
    assert not prompt.is_finished
    last = prompt.handle(ChoiceFinished(0, "length"))
    assert last is not None
    assert last.text == "\ufffd"
    assert prompt.is_finished
    assert prompt.completion_tokens == 2
