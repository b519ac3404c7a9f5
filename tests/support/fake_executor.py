"""A model that costs nothing and betrays every page mistake.

Each token's "KV" is its token id and a stamp chained over everything before it. Computing a slice
reads the chain back from the pages of the whole history and raises when any page holds anything
but the sequence's own prefix: a page reused too early, a wrong table, bytes that never arrived.
Tokens drawn depend on the last stamp, the seed, the choice and the output index only, so the
expected output of a request is a pure function (:func:`fake_output`).

As on a device, steps and copies of pages take effect in the order of the calls, at the latest when
somebody waits for one (:class:`FakeStream`); what peers write and read does so at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.ports import PageCopier, SlotArray
from worker.messages import SamplingParams, StopRule
from worker.ports import Draw, Drawn, Executor, LaunchedStep, RowFailed, Slice, SliceResult
from worker.token_runs import TokenLogprob

MASK = (1 << 64) - 1
ROOT_STAMP = 0x9E3779B97F4A7C15
EMPTY = -1


class WrongPage(AssertionError):
    """A page holds something else than the sequence that reads it has computed."""


class FakeStream:
    """Work in order, done as late as can be."""

    def __init__(self) -> None:
        self._queued: deque[Callable[[], None]] = deque()
        self._started = 0
        self._done = 0

    def add(self, work: Callable[[], None]) -> int:
        """Queue work; returns its number."""
        self._queued.append(work)
        self._started += 1
        return self._started

    def wait_for(self, number: int) -> None:
        """Do everything up to this work."""
        while self._done < number:
            self._done += 1
            self._queued.popleft()()

    def wait(self) -> None:
        """Do everything."""
        self.wait_for(self._started)


class FakeMemory(PageCopier):
    """Bytes of all pools: token id and stamp of each token of each slot, by pool group. A copy is
    waited for.
    """

    def __init__(
        self, plan: LayoutPlan, slots: Sequence[int], host_slots: Sequence[int] = ()
    ) -> None:
        shapes = [(count, plan.tokens_per_block) for count in slots]
        hosted = [(count, plan.tokens_per_block) for count in host_slots]
        self.stream = FakeStream()
        self.tokens = [np.full(shape, EMPTY, dtype=np.int64) for shape in shapes]
        self.stamps = [np.zeros(shape, dtype=np.uint64) for shape in shapes]
        self.host_tokens = [np.full(shape, EMPTY, dtype=np.int64) for shape in hosted]
        self.host_stamps = [np.zeros(shape, dtype=np.uint64) for shape in hosted]

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        self.stream.wait()
        self.tokens[pool_group][targets] = self.tokens[pool_group][sources]
        self.stamps[pool_group][targets] = self.stamps[pool_group][sources]

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        self.stream.wait()
        self.host_tokens[pool_group][host_slots] = self.tokens[pool_group][device_slots]
        self.host_stamps[pool_group][host_slots] = self.stamps[pool_group][device_slots]
        self.tokens[pool_group][device_slots] = EMPTY

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        self.stream.wait()
        self.tokens[pool_group][device_slots] = self.host_tokens[pool_group][host_slots]
        self.stamps[pool_group][device_slots] = self.host_stamps[pool_group][host_slots]

    def write_slot(
        self,
        pool_group: int,
        slot: int,
        data: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]],
    ) -> None:
        """What arrives of one slot from another memory."""
        self.tokens[pool_group][slot], self.stamps[pool_group][slot] = data

    def read_slot(
        self, pool_group: int, slot: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """A copy of one slot, to be sent."""
        return self.tokens[pool_group][slot].copy(), self.stamps[pool_group][slot].copy()


def chain(stamp: int, token: int) -> int:
    """The stamp of ``token`` after a prefix with ``stamp``."""
    value = (stamp * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return value ^ (value >> 29)


def chains(
    stamps: npt.NDArray[np.uint64], tokens: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """:func:`chain` of many pairs at once."""
    value: npt.NDArray[np.uint64] = stamps * np.uint64(6364136223846793005) + tokens * np.uint64(
        1442695040888963407
    )
    value += np.uint64(1)
    value ^= value >> np.uint64(29)
    return value


def fake_draw(stamp: int, seed: int, choice: int, index: int, vocab_size: int) -> int:
    """The token drawn after a prefix with ``stamp``."""
    value = chain(chain(chain(stamp, seed & 0xFFFFFFFF), choice + 1), index + 1)
    return (value >> 17) % vocab_size


def draw_allowed(
    stamp: int,
    params: SamplingParams,
    choice: int,
    index: int,
    vocab_size: int,
    banned: Sequence[int],
) -> int:
    """As :func:`fake_draw`, going on to the next id while one is banned."""
    token = fake_draw(stamp, params.seed, choice, index, vocab_size)
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def fake_output(
    prompt: Sequence[int], params: SamplingParams, stop: StopRule, choice: int, vocab_size: int
) -> list[int]:
    """All output tokens of one choice, by the rules and without any engine."""
    stamp = ROOT_STAMP
    for token in prompt:
        stamp = chain(stamp, int(token))
    output: list[int] = []
    while len(output) < stop.max_tokens:
        index = len(output)
        banned = stop.stop_token_ids if index < stop.min_tokens else ()
        token = draw_allowed(stamp, params, choice, index, vocab_size, banned)
        output.append(token)
        if token in stop.stop_token_ids:
            break
        stamp = chain(stamp, token)
    return output


class FakeStep(LaunchedStep):
    """A step of a :class:`FakeExecutor`: computed in its turn, before its results are taken."""

    def __init__(self, slices: Sequence[Slice], stream: FakeStream) -> None:
        tables = [tuple(table.copy() for table in part.block_tables) for part in slices]
        pairs = zip(slices, tables, strict=True)
        self.slices = [
            part._replace(tokens=part.tokens.copy(), block_tables=own) for part, own in pairs
        ]
        self.results: list[SliceResult] = []
        self.is_over = False
        self.number = 0
        self._stream = stream

    @property
    def drawn(self) -> list[int]:
        """The tokens of all draws in order; of a failed row whatever."""
        return [
            token
            for part, result in zip(self.slices, self.results, strict=True)
            for token in (
                [0] * len(part.draws)
                if isinstance(result, RowFailed)
                else [drawn.token for drawn in result]
            )
        ]

    @override
    def wait(self) -> list[SliceResult]:
        self._stream.wait_for(self.number)
        self.is_over = True
        return self.results


class FakeExecutor(Executor):
    """Computes slices on a :class:`FakeMemory`. Tokens in ``poison`` make their slice's logits
    unusable.
    """

    def __init__(
        self, plan: LayoutPlan, memory: FakeMemory, *, vocab_size: int, depth: int = 1
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._vocab_size = vocab_size
        self._depth = depth
        self._last: FakeStep | None = None
        self.poison: set[int] = set()
        self.batches: list[list[tuple[int, int, int]]] = []
        """(sequence, start, tokens) of each slice of each step."""
        self.computed_tokens = 0
        self.fed_rows = 0
        """Rows whose token the step before them drew."""

    @property
    @override
    def depth(self) -> int:
        return self._depth

    @override
    def launch(self, slices: Sequence[Slice]) -> FakeStep:
        self.batches.append([(part.sequence, part.start, len(part.tokens)) for part in slices])
        written = self._owned_slots(slices)
        assert len(written) == len(set(written)), "two slices write to one page in one step"
        before, step = self._last, FakeStep(slices, self._memory.stream)
        self._last = step
        self.fed_rows += sum(part.feed is not None for part in slices)
        step.number = self._memory.stream.add(lambda: self._compute(step, before))
        return step

    def touched(self) -> list[tuple[int, npt.NDArray[np.int32]]]:
        """Pool groups and slots that the last step reads and writes, while it is under way."""
        step, block = self._last, self._plan.tokens_per_block
        if step is None or step.is_over:
            return []
        touched = []
        for part in step.slices:
            for group, table in zip(self._plan.layer_groups, part.block_tables, strict=True):
                start, end = group.life_cycle.stale_range(part.start, block)
                last = -(-(part.start + len(part.tokens)) // block)
                touched.append((group.pool_group, np.concatenate((table[:start], table[end:last]))))
        return touched

    def _compute(self, step: FakeStep, before: FakeStep | None) -> None:
        for part in step.slices:
            if part.feed is not None:
                assert before is not None
                part.tokens[:] = before.drawn[part.feed]
            step.results.append(self._run(part))

    def _owned_slots(self, slices: Sequence[Slice]) -> list[tuple[int, int]]:
        block = self._plan.tokens_per_block
        written = []
        for part in slices:
            first, end = part.start // block, -(-(part.start + len(part.tokens)) // block)
            for group, table in zip(self._plan.layer_groups, part.block_tables, strict=True):
                own = table if group.life_cycle.is_state else table[first:end]
                written += [(group.pool_group, int(slot)) for slot in own]
        return written

    def _run(self, part: Slice) -> SliceResult:
        self.computed_tokens += len(part.tokens)
        stamps = [
            self._update(group.pool_group, part, int(part.block_tables[index][0]))
            if group.life_cycle.is_state
            else self._write(index, part)
            for index, group in enumerate(self._plan.layer_groups)
        ]
        if len(set(stamps)) != 1:
            raise WrongPage(f"sequence {part.sequence}: layer groups disagree about the prefix")
        if part.draws and self.poison.intersection(part.tokens.tolist()):
            return RowFailed("poisoned")
        return tuple(self._draw(stamps[0], draw) for draw in part.draws)

    def _update(self, pool_group: int, part: Slice, slot: int) -> int:
        """Bring a state forward, which is the last stamp and, as its token, its length."""
        tokens, stamps = self._memory.tokens[pool_group], self._memory.stamps[pool_group]
        stamp = ROOT_STAMP
        if part.start:
            if tokens[slot, 0] != part.start:
                raise WrongPage(f"sequence {part.sequence}: its state has {tokens[slot, 0]} tokens")
            stamp = int(stamps[slot, 0])
        kept = part.snapshot
        for index, token in enumerate(part.tokens.tolist(), part.start + 1):
            stamp = chain(stamp, token)
            if kept is not None and kept.length == index:
                tokens[kept.slot, 0], stamps[kept.slot, 0] = index, stamp
        tokens[slot, 0], stamps[slot, 0] = part.start + len(part.tokens), stamp
        return stamp

    def _write(self, group: int, part: Slice) -> int:
        """Check the history in one layer group, write the new tokens, return the last stamp."""
        layer_group = self._plan.layer_groups[group]
        table = part.block_tables[group]
        block = self._plan.tokens_per_block
        tokens = self._memory.tokens[layer_group.pool_group]
        stamps = self._memory.stamps[layer_group.pool_group]
        stale_start, stale_end = layer_group.life_cycle.stale_range(part.start, block)
        stamp = ROOT_STAMP
        for first, end in ((0, stale_start), (stale_end, -(-part.start // block))):
            if first >= end:
                continue
            slots = table[first:end]
            if slots.min() < 0:
                raise WrongPage(f"sequence {part.sequence}: a block of [{first}, {end}) is gone")
            length = min(end * block, part.start) - first * block
            found = stamps[slots].reshape(-1)[:length]
            read = tokens[slots].reshape(-1)[:length].astype(np.uint64)
            # Behind a gap the first stamp has nothing before it to be checked against.
            known = [ROOT_STAMP] if first == 0 else []
            before = np.concatenate([np.array(known, dtype=np.uint64), found[:-1]])
            wrong = chains(before, read[len(read) - len(before) :]) != found[-len(before) :]
            if len(before) and wrong.any():
                raise WrongPage(
                    f"sequence {part.sequence}: layer group {group} does not hold its prefix in "
                    f"blocks [{first}, {end}): {slots.tolist()}"
                )
            stamp = int(found[-1])
        for index, token in enumerate(part.tokens.tolist()):
            ordinal, offset = divmod(part.start + index, block)
            slot = int(table[ordinal])
            if slot < 0:
                raise WrongPage(f"sequence {part.sequence}: no page for block {ordinal}")
            stamp = chain(stamp, token)
            tokens[slot, offset], stamps[slot, offset] = token, stamp
        return stamp

    def _draw(self, stamp: int, draw: Draw) -> Drawn:
        token = draw_allowed(
            stamp, draw.params, draw.choice, draw.output_index, self._vocab_size, draw.banned
        )
        logprob = None
        if draw.params.logprobs is not None:
            top = tuple((token + rank, -1.0 - rank) for rank in range(draw.params.logprobs))
            logprob = TokenLogprob(logprob=-1.0 - draw.output_index, top=top)
        return Drawn(token, logprob)
