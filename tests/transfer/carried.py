"""Carries out all plans of two instances for a request and checks every byte of the receivers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvcache_core.arithmetic import ceil_div
from tests.transfer.filled_pools import PADDING, FilledPools, Pools, Slots
from tests.transfer.page_values import Bytes
from transfer.compatibility import check_peer
from transfer.copy_plan import CopyPlan
from transfer.host_copies import HostCopies
from transfer.incompatibility import Incompatibility
from transfer.plan import GroupPlan, TransferPlan
from transfer.rank_info import RankInfo

COPIES = HostCopies()


def reasons(senders: list[RankInfo], receivers: list[RankInfo]) -> set[Incompatibility]:
    """Why any pair of them is refused; both ends must find the same."""
    found: set[Incompatibility] = set()
    for sender in senders:
        for receiver in receivers:
            rows = set(check_peer(sender, receiver))
            assert {
                Incompatibility(row.field, row.remote, row.local, row.advice)
                for row in check_peer(receiver, sender)
            } == rows
            found |= rows
    return found


@dataclass
class Request:
    """One prompt, sent in two chunks from any first block of each receiving layer group."""

    random: Random
    prompt_tokens: int
    tokens_per_block: int
    checked_bytes: int = field(default=0, init=False)
    """Destination bytes found right."""

    @property
    def end_block(self) -> int:
        """Blocks of the prompt."""
        return ceil_div(self.prompt_tokens, self.tokens_per_block)

    def carry(self, senders: list[RankInfo], receivers: list[RankInfo]) -> None:
        """Send everything, then check every receiver."""
        sources = [FilledPools(info, self.prompt_tokens, self.random) for info in senders]
        for source in sources:
            source.fill()
        for receiver in receivers:
            target = FilledPools(receiver, self.prompt_tokens, self.random)
            _Delivery(self, target).run(sources)


class _Delivery:
    """Everything one receiver gets."""

    def __init__(self, request: Request, target: FilledPools) -> None:
        self._request = request
        self._random = request.random
        self._target = target
        self._firsts = {
            group.layer_group: self._random.choice(
                [0, 0, self._random.randint(0, request.end_block)]
            )
            for group in target.info.page_table.groups
        }
        self._times = target.like(0)

    def run(self, sources: list[FilledPools]) -> None:
        alone: set[int] = set()
        for source in sources:
            plan = TransferPlan.between(source.info, self._target.info)
            alone |= set(plan.receiver_only_drafts)
            touched = self._target.like(0)
            for group in plan.groups:
                self._send(group, source, touched)
            for pool_group, pools in touched.items():
                for marks, times in zip(pools, self._times[pool_group], strict=True):
                    times += marks
        self._check_buffers(alone)
        self._check_others()

    def _send(self, group: GroupPlan, source: FilledPools, touched: Pools) -> None:
        first, end = self._firsts[group.receiver.layer_group], self._request.end_block
        middle = self._random.randint(first, end)
        origins = source.pools[group.sender.pool_group]
        ones = [np.ones_like(pool) for pool in origins]
        for start, stop in ((first, middle), (middle, end)):
            pairs = group.blocks(start, stop, self._request.prompt_tokens)
            sender_slots = source.slots[group.sender.layer_group][pairs.sender_positions]
            receiver_slots = self._target.slots[group.receiver.layer_group][
                pairs.receiver_positions
            ]
            for pools, places in (
                (origins, self._target.pools[group.receiver.pool_group]),
                (ones, touched[group.receiver.pool_group]),
            ):
                _copy(group, (pools, sender_slots), (places, receiver_slots))

    def _check_buffers(self, alone: set[int]) -> None:
        """Live blocks from the first one on, and no others, were written once and right."""
        for held in self._target.buffers():
            last = self._request.end_block - 1
            places = [last] if held.group.kind == "state" else held.ordinals
            due = np.array(places, dtype=int) >= self._firsts[held.group.layer_group]
            if held.buffer.layer_id in alone:
                due[:] = False
            expected = np.where(due[:, None, None], held.values(), np.uint8(PADDING))
            times = np.broadcast_to(due[:, None, None], expected.shape)
            assert np.array_equal(held.data(self._times)[held.slots], times)
            assert np.array_equal(held.data(self._target.pools)[held.slots], expected)
            self._request.checked_bytes += int(times.sum())

    def _check_others(self) -> None:
        """Slots of nobody were not touched, padding at most once."""
        for pool_group, pools in self._times.items():
            groups = [
                group
                for group in self._target.info.page_table.groups
                if group.pool_group == pool_group
            ]
            held = np.concatenate([self._target.slots[group.layer_group] for group in groups])
            for times, pool in zip(pools, self._target.pools[pool_group], strict=True):
                others = np.setdiff1d(np.arange(len(times)), held)
                assert len(others)
                assert (times <= 1).all()
                assert not times[others].any()
                assert (pool[others] == PADDING).all()


def _copy(
    group: GroupPlan, origin: tuple[list[Bytes], Slots], place: tuple[list[Bytes], Slots]
) -> None:
    """Blocks in slots of one end to slots of the other, as the group's plan says."""
    (pools, slots), (targets, places) = origin, place
    assert (slots >= 0).all()
    assert (places >= 0).all()
    if group.direct:
        for pool, target in zip(pools, targets, strict=True):
            target[places] = pool[slots]
        return
    copies = CopyPlan.of(group)
    message = np.empty(len(slots) * copies.block_bytes, dtype=np.uint8)
    COPIES.gather(copies, pools, slots, message)
    COPIES.scatter(copies, message, targets, places)
