"""Output tokens of many requests in one message, as columns.

A step gives each of hundreds of choices one token. As a validated object each they cost both ends
more than all else a step says; columns of bytes cost less than half of it. Nobody but this file
sees the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter

from transfer.wire import Message, unpack_ints

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


class TokenLogprob(Message):
    """Log-probability of one output token and of the most likely alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenRun(NamedTuple):
    """Consecutive output tokens of one choice, from output index ``start``. May repeat what another
    worker sent.
    """

    request_id: str
    choice: int
    start: int
    tokens: bytes
    """As ``pack_ints`` makes them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, or none."""
    finish: FinishReason | None = None
    """Set on the run that holds the last token."""


_Row = Annotated[int, Field(ge=0)]


class _Columns(Message):
    """Runs as they travel. ``numbers`` are int32 ``[runs, 3]``: choice, start, count of tokens."""

    requests: tuple[str, ...]
    numbers: bytes
    tokens: bytes
    logprobs: tuple[tuple[_Row, tuple[TokenLogprob, ...]], ...] = ()
    """Of the rows that have them."""
    finishes: tuple[tuple[_Row, FinishReason], ...] = ()


_COLUMNS: Final = TypeAdapter(_Columns)


def _packed(runs: Sequence[TokenRun]) -> dict[str, Any]:
    numbers = [(run.choice, run.start, len(run.tokens) // 4) for run in runs]
    return {
        "requests": [run.request_id for run in runs],
        "numbers": np.array(numbers, dtype="<i4").tobytes(),
        "tokens": b"".join([run.tokens for run in runs]),
        "logprobs": [
            (row, [one.model_dump() for one in run.logprobs])
            for row, run in enumerate(runs)
            if run.logprobs
        ],
        "finishes": [(row, run.finish) for row, run in enumerate(runs) if run.finish is not None],
    }


def _unpacked(value: object) -> tuple[TokenRun, ...]:
    """Runs from columns; runs made in this process are taken as they are."""
    if not isinstance(value, Mapping):
        if isinstance(value, tuple) and all(isinstance(run, TokenRun) for run in value):
            return value
        raise ValueError(f"expected token runs as columns, got {type(value).__name__}")
    columns = _COLUMNS.validate_python(value)
    numbers = unpack_ints(columns.numbers)
    count = len(columns.requests)
    if len(numbers) != 3 * count:
        raise ValueError(f"expected 3 numbers for each of {count} runs, got {len(numbers)}")
    table = numbers.reshape(count, 3)
    if (table < 0).any():
        raise ValueError("expected choice, start and number of tokens of a run to be 0 or more")
    ends = np.cumsum(table[:, 2], dtype=np.int64) * 4
    if len(columns.tokens) != (ends[-1] if count else 0):
        raise ValueError(
            f"expected {ends[-1] if count else 0} bytes of tokens, got {len(columns.tokens)}"
        )
    logprobs = _by_row(columns.logprobs, count)
    finishes = _by_row(columns.finishes, count)
    runs: list[TokenRun] = []
    start = 0
    for row, (request_id, (choice, first, length), end) in enumerate(
        zip(columns.requests, table.tolist(), ends.tolist(), strict=True)
    ):
        told = logprobs.get(row, ())
        if told and len(told) != length:
            raise ValueError(f"expected log-probabilities of {length} tokens, got {len(told)}")
        tokens = columns.tokens[start:end]
        runs.append(TokenRun(request_id, choice, first, tokens, told, finishes.get(row)))
        start = end
    return tuple(runs)


def _by_row(pairs: Sequence[tuple[int, T]], count: int) -> dict[int, T]:
    found = dict(pairs)
    if len(found) != len(pairs) or any(row >= count for row in found):
        raise ValueError(f"expected each of {count} runs at most once, got {len(pairs)} rows")
    return found


TokenRuns = Annotated[
    tuple[TokenRun, ...], PlainValidator(_unpacked), PlainSerializer(_packed, return_type=dict)
]
"""A field of a message."""
