"""What the engine needs from the outside, as small Protocols: pages, transfers, computation,
output, time.

The real ones are ``kvcache_core``'s manager behind the operation log, ``transfer``'s agent,
``worker.executor``, the front-end server and the monotonic clock; tests give others. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.hashing import Prompt
from transfer.agent_events import AgentEvent
from transfer.agent_figures import TransferFigures
from transfer.identity import PeerAddress
from transfer.lease import TransferLease
from transfer.messages import HandoffData
from transfer.prefix import Prefix
from worker.inbox import RankReported
from worker.messages import SamplingParams, StepOutput
from worker.token_runs import TokenLogprob

GREEDY_TEMPERATURE: Final = 1e-5
"""Below this, dividing by the temperature says nothing that argmax does not."""


class Clock(Protocol):
    """Monotonic milliseconds."""

    def now_ms(self) -> int:
        """Milliseconds since some fixed moment."""


class CacheSequence(Protocol):
    """Pages of one sequence: ``committed <= history <= capacity`` tokens."""

    @property
    def name(self) -> int:
        """What all ranks know it by."""

    @property
    def matched_tokens(self) -> int: ...

    @property
    def host_matched_tokens(self) -> int:
        """Matched tokens of blocks of which a page lay in host memory."""

    @property
    def committed(self) -> int: ...

    @property
    def history(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def is_resident(self) -> bool:
        """False while a matched page lies on the host, until it grows."""

    def grow(self, capacity: int) -> bool: ...

    def grow_to_receive(self, capacity: int) -> bool: ...

    def advance(self, history: int) -> None: ...

    def commit(self, tokens: npt.NDArray[np.int32]) -> None: ...

    def acquire_snapshot_slot(self) -> int | None:
        """A slot for the state of a coming commit; None where there is none."""

    def commit_with_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Commit, and keep what the step wrote to the acquired slot as the state at that length."""

    def commit_with_live_snapshot(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Commit all that is final, and keep a copy of the state at that length."""

    def fork(self) -> CacheSequence | None: ...

    def suspend(self) -> None: ...

    def resume(self) -> bool: ...

    def close(self) -> None: ...

    def announce(self) -> None:
        """Others may wait for the full blocks that it computes of what it was opened with."""

    def block_tables(self) -> tuple[npt.NDArray[np.int32], ...]: ...

    def lease(self, first_block: int, end_block: int) -> TransferLease: ...


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of the scarcest pool group."""

    total: int
    available: int
    """Free plus evictable."""
    cached: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the cache did since it was made; pages of all layer groups."""

    evicted_pages: int
    demoted_pages: int
    """Moved to host memory for room."""
    onboarded_pages: int
    """Brought back from host memory."""


@dataclass(frozen=True, slots=True)
class AwaitedPrefix:
    """Blocks that a running sequence computes now, right after those that are known."""

    key: bytes
    """Of the last of them."""
    tokens: int
    end_tokens: int
    """Length of the prompt up to them."""


class CacheManager(Protocol):
    """The pages of this worker."""

    @property
    def tokens_per_block(self) -> int: ...

    def open(
        self, scope: bytes, tokens: npt.NDArray[np.int32], *, max_match: int
    ) -> CacheSequence: ...

    def prompt(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> Prompt:
        """Tokens with their block keys, for whoever asks about them more than once."""

    def known_tokens(self, prompt: Prompt) -> int:
        """Tokens that ``open`` would reuse now. Changes nothing."""

    def awaited_prefix(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> AwaitedPrefix | None:
        """What of ``tokens`` is worth waiting for, because another sequence computes it; counted
        as a wait.
        """

    def uncached_tokens(self, scope: bytes, tokens: npt.NDArray[np.int32]) -> int:
        """Tokens of a prompt that nobody has and nobody computes now. Changes nothing."""

    def is_announced(self, key: bytes) -> bool:
        """Whether a running sequence still computes the block with this key."""

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix is reusable only at lengths where its recurrent state was kept."""

    def branch_point(
        self, scope: bytes, tokens: npt.NDArray[np.int32], position: int
    ) -> int | None:
        """Where a prompt, of which ``position`` tokens are there, leaves all that is known, if a
        state is worth keeping there.
        """

    def count_snapshots_asked(self, points: int) -> None:
        """A sequence was asked to keep its state at so many points."""

    def release(self, lease: TransferLease) -> None: ...

    def quarantine(self, lease: TransferLease) -> None: ...

    def available_slots(self) -> tuple[int, ...]:
        """Free and evictable slots per pool group."""

    def total_slots(self) -> tuple[int, ...]:
        """Slots per pool group that are not in quarantine."""

    def block_counts(self) -> BlockCounts: ...

    def totals(self) -> CacheTotals: ...

    def report(self, now_ms: int) -> str | None:
        """A line for the log about what the cache did; None while none is due."""

    def run_step(self, step: int, slices: Sequence[Slice], rows: StepRows) -> None:
        """This step is launched now, on every rank: these slices on those of this dp group, which
        are among ``rows``.
        """

    def end_step(self, step: int) -> None:
        """The results of this step were taken: what comes now is behind its end on every rank."""

    def flush(self) -> None:
        """The engine rests: every rank is to know what was done up to here."""


class Transfers(Protocol):
    """The transfer agent. Non-blocking; what happens comes back as agent events through the
    inbox.
    """

    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None: ...

    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None: ...

    def announce(self, request_id: str) -> None: ...

    def ship(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None: ...

    def hand_off(self, request_id: str, handoff: HandoffData) -> None: ...

    def no_decode(self, request_id: str) -> None: ...

    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None: ...

    def found(self, request_id: str, end_block: int) -> None: ...

    def decline(self, request_id: str, reason: str) -> None: ...

    def cancel(self, request_id: str, reason: str) -> None: ...

    def keep_warm(self, peers: Sequence[PeerAddress]) -> None: ...

    @property
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        """Peers that do not fit this worker, with every reason."""

    @property
    def figures(self) -> TransferFigures:
        """Pairs and totals now."""


class Agreement(Protocol):
    """What the ranks of the instance agree on about their transfers."""

    def heard(self, item: AgentEvent | RankReported) -> Sequence[AgentEvent]:
        """What the engine is to hear of it now, if anything."""


class OnlyRank(Agreement):
    """One rank agrees with itself."""

    @override
    def heard(self, item: AgentEvent | RankReported) -> Sequence[AgentEvent]:
        return () if isinstance(item, RankReported) else (item,)


class Draw(NamedTuple):
    """One token to draw from a row of logits. Nothing else decides which token the row gives.

    ``output_index`` counts the output tokens before this one; with the seed and the choice it is
    the whole key of the noise. ``output_tokens`` lacks one that is being drawn. ``banned`` tokens
    are never drawn.
    """

    params: SamplingParams
    choice: int
    output_index: int
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    banned: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken; no noise."""
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Something is added to or taken from the model's logits before temperature."""
        return bool(self.banned or self.params.logit_bias or self.params.looks_back)

    @property
    def is_filtered(self) -> bool:
        """Unlikely tokens are cut off."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


class StateSnapshot(NamedTuple):
    """The state after ``length`` tokens of a sequence is also written to ``slot``."""

    length: int
    slot: int


class Slice(NamedTuple):
    """Tokens ``[start, start + len(tokens))`` of one sequence, to be computed in this step."""

    sequence: int
    tokens: npt.NDArray[np.int32]
    start: int
    block_tables: tuple[npt.NDArray[np.int32], ...]
    """Slot of each block, one array a layer group; -1 where stale."""
    draws: tuple[Draw, ...]
    """Drawn from the logits of its last token; empty for a chunk before the end."""
    snapshot: StateSnapshot | None = None
    """A state to be kept in mid-chunk; only where the engine was told that the model can."""
    feed: int | None = None
    """Of a step launched while the one before it is under way: the one token is what that step
    draws as number ``feed`` of all its draws in order, and ``tokens`` says nothing.
    """
    dp_rank: int = 0
    """The dp group that the sequence lives on."""


class StepRows(NamedTuple):
    """What each dp group has to compute in one step; nothing is said of an only group."""

    tokens: tuple[int, ...]
    draws: tuple[int, ...]
    """Slices whose last logits are wanted."""


def step_rows(slices: Sequence[Slice], dp_size: int) -> StepRows:
    """Of the slices of all groups."""
    if dp_size == 1:
        return StepRows((), ())
    tokens, draws = [0] * dp_size, [0] * dp_size
    for part in slices:
        tokens[part.dp_rank] += len(part.tokens)
        draws[part.dp_rank] += bool(part.draws)
    return StepRows(tuple(tokens), tuple(draws))


class Drawn(NamedTuple):
    """One drawn token."""

    token: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The logits of one slice are unusable; the others are sound."""

    reason: str


SliceResult = tuple[Drawn, ...] | RowFailed


class LaunchedStep(Protocol):
    """A step that is under way."""

    def wait(self) -> list[SliceResult]:
        """One result a slice, in order, once KV of all its slices is final in the pages' memory.
        Called once. Raises only when the worker as a whole is unusable.
        """


class Executor(Protocol):
    """Model and sampler. Steps, and copies of pages, take effect in the order of the calls; only
    what a peer writes or reads has no place in it.
    """

    @property
    def depth(self) -> int:
        """Steps that may be under way at once: 2 where a step may begin before the results of the
        one before it are there, else 1.
        """

    def launch(self, slices: Sequence[Slice]) -> LaunchedStep:
        """Begin a step. ``slices`` have been read when this returns; their tables may change."""

    def execute(self, slices: Sequence[Slice]) -> list[SliceResult]:
        """Begin a step and wait for it: one result a slice, in order, which is that of dp groups.
        Raises only when the worker as a whole is unusable.
        """
        return self.launch(slices).wait()


@dataclass(frozen=True, eq=False, slots=True)
class EndedStep(LaunchedStep):
    """A step that was over when it was launched."""

    results: list[SliceResult]

    @override
    def wait(self) -> list[SliceResult]:
        return self.results


class Output(Protocol):
    """Takes what a step produced to the front ends. Never blocks."""

    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        """Pairs of front-end connection and output."""

    def broadcast(self, output: StepOutput) -> None:
        """To every connected front end."""
