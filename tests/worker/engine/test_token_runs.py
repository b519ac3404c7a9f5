"""Token runs travel as columns and arrive as they left."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.wire import HEADER, FrameError, pack_ints
from worker.messages import WORKER_CODEC, StepOutput
from worker.token_runs import TokenLogprob, TokenRun

TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)
LOGPROBS = st.builds(
    TokenLogprob,
    logprob=st.floats(-100, 0),
    top=st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(-100, 0)), max_size=3).map(tuple),
)


@st.composite
def token_runs(draw: st.DrawFn) -> TokenRun:
    tokens = draw(TOKENS)
    count = len(tokens) if draw(st.booleans()) else 0
    return TokenRun(
        request_id=draw(st.text(max_size=12)),
        choice=draw(st.integers(0, 1 << 30)),
        start=draw(st.integers(0, 1 << 30)),
        tokens=pack_ints(tokens),
        logprobs=tuple(draw(st.lists(LOGPROBS, min_size=count, max_size=count))),
        finish=draw(st.sampled_from([None, "stop", "length"])),
    )


@given(st.lists(token_runs(), max_size=6).map(tuple))
def test_they_arrive_as_they_left(runs: tuple[TokenRun, ...]) -> None:
    assert WORKER_CODEC.decode(WORKER_CODEC.encode(StepOutput(runs=runs))) == StepOutput(runs=runs)


GOOD: dict[str, Any] = {
    "requests": ["a", "b"],
    "numbers": pack_ints((0, 0, 1, 1, 5, 2)),
    "tokens": pack_ints((7, 8, 9)),
    "logprobs": [(0, [{"logprob": -1.0, "top": ()}])],
    "finishes": [(1, "stop")],
}


def decoded(**changes: Any) -> StepOutput:
    body = msgpack.packb({"kind": "step", "runs": {**GOOD, **changes}}, use_bin_type=True)
    message = WORKER_CODEC.decode_body(body)
    assert isinstance(message, StepOutput)
    return message


def test_columns_are_what_is_documented() -> None:
    one, two = decoded().runs
    assert one == TokenRun("a", 0, 0, pack_ints((7,)), (TokenLogprob(logprob=-1.0),))
    assert two == TokenRun("b", 1, 5, pack_ints((8, 9)), finish="stop")
    frame = WORKER_CODEC.encode(decoded())
    assert msgpack.unpackb(frame[HEADER.size :], use_list=False)["runs"]["tokens"] == GOOD["tokens"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"requests": ["a"]}, "3 numbers"),
        ({"numbers": b"\0\0\0"}, "multiple of 4"),
        ({"numbers": pack_ints((0, 0, 1, 1, 5, -2))}, "0 or more"),
        ({"numbers": pack_ints((0, -1, 1, 1, 5, 2))}, "0 or more"),
        ({"tokens": pack_ints((7, 8))}, "12 bytes"),
        ({"tokens": b"\0" * 16}, "12 bytes"),
        ({"logprobs": [(1, [{"logprob": -1.0, "top": ()}])]}, "of 2 tokens"),
        ({"logprobs": [(2, [{"logprob": -1.0, "top": ()}])]}, "at most once"),
        ({"finishes": [(1, "stop"), (1, "length")]}, "at most once"),
        ({"finishes": [(-1, "stop")]}, "greater than or equal to 0"),
        ({"finishes": [(0, "later")]}, "'stop' or 'length'"),
        ({"more": 1}, "not permitted"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decoded(**changes)


@pytest.mark.parametrize("runs", [[1], (1,), "runs", None])
def test_what_is_neither_columns_nor_runs_is_refused(runs: object) -> None:
    body = msgpack.packb({"kind": "step", "runs": runs}, use_bin_type=True)
    with pytest.raises(FrameError, match="expected token runs as columns"):
        WORKER_CODEC.decode_body(body)
