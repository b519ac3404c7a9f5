"""The numbered operation log that keeps the page tables of all ranks of an instance the same.

The leader decides; every change of its manager and every step is one typed operation. A follower
applies them in order to its own manager and, being deterministic, ends up with the same tables: it
says so by a checksum over the tables of each step, which the leader compares one step late. With
one rank there is no follower and nothing is recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from transfer.wire import Codec, Message
from worker.transfer_log import TransferOperation

BlockTables = tuple[npt.NDArray[np.int32], ...]


class OpenSequence(Message):
    """``manager.open``; the sequence is known as ``sequence`` from now on."""

    kind: Literal["open"] = "open"
    sequence: int
    scope: bytes
    tokens: bytes
    max_match: int


class GrowSequence(Message):
    """``SequenceCache.grow``; ``granted`` is what it returned on the leader."""

    kind: Literal["grow"] = "grow"
    sequence: int
    capacity: int
    granted: bool


class GrowToReceive(Message):
    """``SequenceCache.grow_to_receive``; ``granted`` is what it returned on the leader."""

    kind: Literal["grow_to_receive"] = "grow_to_receive"
    sequence: int
    capacity: int
    granted: bool


class AdvanceSequence(Message):
    """``SequenceCache.advance``."""

    kind: Literal["advance"] = "advance"
    sequence: int
    history: int


class CommitSequence(Message):
    """``SequenceCache.commit``."""

    kind: Literal["commit"] = "commit"
    sequence: int
    tokens: bytes


class AcquireSnapshot(Message):
    """``SequenceCache.acquire_snapshot_slot``; ``granted``: it gave a slot on the leader."""

    kind: Literal["acquire_snapshot"] = "acquire_snapshot"
    sequence: int
    granted: bool


class CommitSnapshot(Message):
    """``SequenceCache.commit_with_snapshot``; ``kept`` is what it returned on the leader."""

    kind: Literal["commit_snapshot"] = "commit_snapshot"
    sequence: int
    tokens: bytes
    kept: bool


class CommitLiveSnapshot(Message):
    """``SequenceCache.commit_with_live_snapshot``; ``kept`` is what it returned on the leader."""

    kind: Literal["commit_live_snapshot"] = "commit_live_snapshot"
    sequence: int
    tokens: bytes
    kept: bool


class ForkSequence(Message):
    """``SequenceCache.fork``; ``branch`` is None where it returned None on the leader."""

    kind: Literal["fork"] = "fork"
    sequence: int
    branch: int | None


class SuspendSequence(Message):
    """``SequenceCache.suspend``."""

    kind: Literal["suspend"] = "suspend"
    sequence: int


class ResumeSequence(Message):
    """``SequenceCache.resume``; ``granted`` is what it returned on the leader."""

    kind: Literal["resume"] = "resume"
    sequence: int
    granted: bool


class CloseSequence(Message):
    """``SequenceCache.close``."""

    kind: Literal["close"] = "close"
    sequence: int


class LeaseBlocks(Message):
    """``SequenceCache.lease``; the lease is known as ``lease`` from now on."""

    kind: Literal["lease"] = "lease"
    sequence: int
    lease: int
    first_block: int
    end_block: int


class ReleaseLease(Message):
    """The lease's pages go back."""

    kind: Literal["release"] = "release"
    lease: int


class QuarantineLease(Message):
    """The lease's pages are in doubt."""

    kind: Literal["quarantine"] = "quarantine"
    lease: int


class RunSlice(Message):
    """Tokens ``[start, start + number of tokens)`` of one sequence. ``draws``: its last logits are
    wanted. ``keeps``: length at which its state is kept in the pending slot, 0 for nowhere.
    ``feed``: as of :class:`worker.ports.Slice`.
    """

    sequence: int
    start: int
    tokens: bytes
    draws: bool
    keeps: int = 0
    feed: int | None = None


class EndStep(Message):
    """The leader has the results of a step: what follows may need its pages to be final."""

    kind: Literal["step_end"] = "step_end"
    step: int


class RunStep(Message):
    """Begin one step: these slices here, while every dp group has ``rows`` tokens and ``draws``
    slices that draw. Both are empty where there is one group.
    """

    kind: Literal["step"] = "step"
    step: int
    slices: tuple[RunSlice, ...]
    rows: tuple[int, ...]
    draws: tuple[int, ...]


PageOperation = Annotated[
    OpenSequence
    | GrowSequence
    | GrowToReceive
    | AdvanceSequence
    | CommitSequence
    | AcquireSnapshot
    | CommitSnapshot
    | CommitLiveSnapshot
    | ForkSequence
    | SuspendSequence
    | ResumeSequence
    | CloseSequence
    | LeaseBlocks
    | ReleaseLease
    | QuarantineLease
    | RunStep
    | EndStep,
    Field(discriminator="kind"),
]


Operation = Annotated[PageOperation | TransferOperation, Field(discriminator="kind")]


class LogEntries(Message):
    """Operations ``first_number, first_number + 1, ...``: everything since the last message, one
    message a step and one behind it.
    """

    kind: Literal["entries"] = "entries"
    first_number: int
    operations: tuple[Operation, ...]


class StepChecksum(Message):
    """What a follower's tables looked like in step ``step``."""

    kind: Literal["checksum"] = "checksum"
    step: int
    checksum: int


LOG_CODEC: Codec[LogEntries] = Codec(LogEntries)
"""Leader to follower."""
CHECKSUM_CODEC: Codec[StepChecksum] = Codec(StepChecksum)
"""Follower to leader."""


class RanksDiverged(RuntimeError):
    """Two ranks of an instance no longer agree about their pages; the instance must end."""


def checksum(number: int, tables: Iterable[BlockTables]) -> int:
    """Checksum of the tables of one step after ``number`` operations."""
    value = zlib.crc32(number.to_bytes(8, "little"))
    for groups in tables:
        for table in groups:
            value = zlib.crc32(np.ascontiguousarray(table).tobytes(), value)
    return value
