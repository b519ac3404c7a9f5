"""The host tier on real memory: nothing is lost between device and host, and hits are counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import SlotArray
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ElementType, KVCacheLayerSpec, ReusePolicy, recurrent_layer
from kvcache_core.storage import TorchStorage
from tests.kvcache_core.storage_rig import RECURRENT, TARGET, attention
from tests.kvcache_core.support import SCOPE, Memory, Rig

BLOCK = 8
LAYOUTS: dict[str, list[KVCacheLayerSpec]] = {
    "one pool": [attention(0, ElementType.BFLOAT16), attention(1, ElementType.BFLOAT16)],
    "packed and fp8 draft": [
        attention(0, ElementType.PACKED4, scale_block_elements=8, head_dim=32),
        attention(1, ElementType.FLOAT16, kv_factor=1),
        attention(10, ElementType.FLOAT8_E4M3, policy=ReusePolicy.OPTIONAL),
    ],
    "window": [attention(0, ElementType.FLOAT32), attention(1, ElementType.FLOAT32, window=11)],
    "states": [
        attention(0, ElementType.FLOAT32),
        recurrent_layer(6, TARGET, [RECURRENT]),
    ],
}


class Watched(TorchStorage):
    """Storage that fails on demand, and notices when a copy starts inside another one."""

    is_broken = False
    is_busy = False

    def _enter(self) -> None:
        assert not self.is_busy, "a copy inside a copy"
        if self.is_broken:
            raise OSError("copy engine is gone")

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        self._enter()
        super().copy_slots(pool_group, sources, targets)

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        self._enter()
        self.is_busy = True
        super().demote_slots(pool_group, device_slots, host_slots)
        self.is_busy = False

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        self._enter()
        super().onboard_slots(pool_group, host_slots, device_slots)


class Server:
    """A manager on real pools that serves prompts and checks every byte it reads. ``slots`` are
    per layer group.
    """

    def __init__(self, layout: str, slots: int, host_slots: int) -> None:
        self.plan = LayoutPlan.derive(LAYOUTS[layout], tokens_per_block=BLOCK)
        counts = [slots * len(group.layer_groups) for group in self.plan.pool_groups]
        hosted = [host_slots * len(group.layer_groups) for group in self.plan.pool_groups]
        self.storage = Watched(self.plan, counts, "cpu", hosted)
        self.manager = UnifiedKVCacheManager(
            self.plan, counts, self.storage, incarnation="worker@0", host_slots=hosted
        )

    def slot_bytes(self, group: int, slot: int) -> torch.Tensor:
        """Every byte of a slot in all pools of its pool group; writable pieces, joined."""
        pool_group = self.plan.layer_groups[group].pool_group
        pools = range(len(self.plan.pool_groups[pool_group].slot_bytes))
        return torch.cat([self.storage.pool_bytes(pool_group, pool)[slot] for pool in pools])

    def pattern(self, group: int, tokens: Sequence[int]) -> torch.Tensor:
        """The bytes of a block's page that ends at ``tokens``: all of them decide."""
        seed = hash((group, tuple(tokens))) % 2**31
        size = self.plan.layer_groups[group].bytes_per_slot
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    def write(self, group: int, slot: int, tokens: Sequence[int]) -> None:
        pool_group, start = self.plan.layer_groups[group].pool_group, 0
        data = self.pattern(group, tokens)
        for pool, size in enumerate(self.plan.pool_groups[pool_group].slot_bytes):
            self.storage.pool_bytes(pool_group, pool)[slot] = data[start : start + size]
            start += size

    def pages(self, sequence: SequenceCache, end: int, live_at: int) -> list[tuple[int, int, int]]:
        """(group, slot, tokens that decide its bytes) of all whole blocks below ``end`` that a
        token at ``live_at`` can see.
        """
        found = []
        for group in self.plan.layer_groups:
            table = sequence.block_table(group.id).tolist()
            if group.life_cycle.is_state:
                found += [(group.id, table[0], end)] if table else []
                continue
            stale = range(*group.life_cycle.stale_range(live_at, BLOCK))
            for block in range(end // BLOCK):
                if block not in stale:
                    assert table[block] >= 0, f"group {group.id} lacks block {block}"
                    found.append((group.id, table[block], (block + 1) * BLOCK))
        return found

    def verify(self, sequence: SequenceCache, tokens: Sequence[int], end: int) -> int:
        """Check the bytes of all whole blocks; returns how many pages were read."""
        pages = self.pages(sequence, end, end)
        for group, slot, length in pages:
            assert torch.equal(self.slot_bytes(group, slot), self.pattern(group, tokens[:length]))
        return len(pages)

    def serve(self, tokens: Sequence[int]) -> SequenceCache:
        """Match, verify what was matched, compute the rest; whole blocks only."""
        sequence = self.manager.open(SCOPE, tokens, max_match=(len(tokens) - 1) // BLOCK * BLOCK)
        matched = sequence.matched_tokens
        assert sequence.grow(len(tokens))
        if matched:
            assert self.verify(sequence, tokens, matched) > 0
        for group, slot, length in self.pages(sequence, len(tokens), matched):
            if length > matched:
                self.write(group, slot, tokens[:length])
        sequence.advance(len(tokens))
        sequence.commit(tokens[matched:])
        self.manager.check()
        return sequence


def prompt(number: int, blocks: int) -> list[int]:
    return [number * 1000 + place for place in range(blocks * BLOCK)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_working_set_three_times_the_device_is_served_from_the_host(layout: str) -> None:
    """Six prompts of four blocks in turn, eight device slots, room for all on the host: from the
    second round on every block that may match comes back from the host, byte for byte.
    """
    server = Server(layout, 8 + 1, 30)  # one slot more: the block that is computed again
    prompts = [prompt(number, 4) for number in range(6)]
    counters = server.manager.counters
    for turn in range(4):
        for tokens in prompts:
            before = (counters.host_matched_tokens, counters.matched_tokens)
            server.serve(tokens).close()
            server.manager.check()
            hits = counters.host_matched_tokens - before[0]
            matched = counters.matched_tokens - before[1]
            if layout == "states":  # a state stands at the end only, which is computed again
                assert matched == 0
            else:
                assert matched == hits == (24 if turn else 0)
    assert counters.pages_demoted > 0
    if layout != "states":
        assert counters.host_matched_tokens == 3 * 6 * 24
        assert counters.pages_onboarded >= 3 * 6 * 3
        assert counters.pages_evicted == 0


def test_states_come_back_from_the_host_at_their_exact_length() -> None:
    server = Server("states", 8, 40)
    conversations = [prompt(number, 2) for number in range(6)]
    for turn in range(3):
        for number, tokens in enumerate(conversations):
            sequence = server.serve(tokens)
            assert sequence.matched_tokens == (len(tokens) - 16 if turn else 0)
            sequence.close()
            conversations[number] = tokens + prompt(100 * (turn + 1) + number, 2)
    assert server.manager.counters.host_matched_tokens == 6 * (16 + 32)
    server.manager.check()


def test_without_a_host_tier_the_same_loop_hits_nothing() -> None:
    server = Server("one pool", 8, 0)
    for _ in range(3):
        for number in range(6):
            server.serve(prompt(number, 4)).close()
    counters = server.manager.counters
    assert (counters.matched_tokens, counters.host_matched_tokens, counters.pages_demoted) == (
        0,
        0,
        0,
    )
    assert counters.pages_evicted == counters.pages_created - 8


def test_tokens_hit_from_the_host_are_counted_to_the_token() -> None:
    """Partly on the device, partly on the host, and inside a block."""
    server = Server("one pool", 8, 8)
    server.serve(prompt(1, 4)).close()
    filler = server.serve(prompt(2, 6))  # two leaves of the first prompt go to the host
    filler.close()
    found = server.manager.look(server.manager.prompt(SCOPE, prompt(1, 4)))
    assert (found.reusable_tokens, found.host_tokens) == (32, 16)
    sequence = server.manager.open(SCOPE, prompt(1, 4), max_match=29)
    counters = server.manager.counters
    assert (sequence.matched_tokens, counters.host_matched_tokens) == (29, 13)
    assert not sequence.is_resident
    assert sequence.block_table(0).tolist()[2:] == [-1, -1]
    with pytest.raises(ValueError, match="lie on the host"):
        sequence.lease(0, 2)
    assert sequence.prefetch()
    assert sequence.is_resident
    assert server.verify(sequence, prompt(1, 4), 29) == 3
    server.manager.check()


def test_eviction_is_never_re_entrant() -> None:
    """Making host room loses pages while device pages are on their way; no copy starts inside."""
    server = Server("packed and fp8 draft", 9, 5)
    for turn in range(40):
        server.serve(prompt(turn % 7, 1 + turn % 4)).close()
        server.manager.check()
    counters = server.manager.counters
    assert min(counters.pages_demoted, counters.pages_onboarded, counters.pages_evicted) > 0


@pytest.mark.parametrize("layout", ["one pool", "packed and fp8 draft", "window"])
def test_a_copier_that_raises_while_demoting_leaves_everything_as_before(layout: str) -> None:
    server = Server(layout, 8, 24)
    held = server.serve(prompt(1, 2))
    server.serve(prompt(2, 4)).close()
    other = server.manager.open(SCOPE, prompt(3, 4), max_match=0)
    before = server.manager.usage()
    server.storage.is_broken = True
    with pytest.raises(OSError, match="copy engine"):
        other.grow(4 * BLOCK)
    server.manager.check()
    assert server.manager.usage() == before
    assert (other.capacity, other.blocks) == (0, 0)
    assert server.manager.probe(SCOPE, prompt(2, 4)) == 32
    server.storage.is_broken = False
    server.verify(held, prompt(1, 2), 16)
    assert other.grow(4 * BLOCK)
    again = server.manager.open(SCOPE, prompt(2, 4), max_match=24)
    other.close()
    assert again.prefetch()
    assert server.verify(again, prompt(2, 4), 24) > 0
    server.manager.check()


def test_a_copier_that_raises_while_onboarding_leaves_everything_as_before() -> None:
    server = Server("one pool", 8, 24)
    server.serve(prompt(1, 4)).close()
    server.serve(prompt(2, 8)).close()
    sequence = server.manager.open(SCOPE, prompt(1, 4), max_match=24)
    server.serve(prompt(3, 1)).close()
    server.manager.open(SCOPE, prompt(9, 1), max_match=0)
    before = server.manager.usage()
    created = server.manager.counters.pages_created
    server.storage.is_broken = True
    with pytest.raises(OSError, match="copy engine"):
        sequence.grow(32)
    server.manager.check()
    assert server.manager.usage() == before
    assert not sequence.is_resident
    assert server.manager.counters.pages_created == created
    server.storage.is_broken = False
    assert sequence.grow(32)
    assert server.verify(sequence, prompt(1, 4), 24) == 3


def test_a_device_pool_that_is_all_leased_refuses_whatever_the_host_has() -> None:
    server = Server("one pool", 8, 24)
    sequence = server.serve(prompt(1, 8))
    lease = sequence.lease(0, 8)
    sequence.close()
    before = server.manager.usage()
    assert server.manager.available_blocks() == 0
    other = server.manager.open(SCOPE, prompt(2, 1), max_match=0)
    assert not other.grow(1)
    assert server.manager.usage() == before
    assert server.manager.counters.pages_demoted == 0
    again = server.manager.open(SCOPE, prompt(1, 8), max_match=56)
    assert again.matched_tokens == 56
    assert server.verify(again, prompt(1, 8), 56) == 7
    again.close()
    lease.release()
    assert other.grow(1)
    assert server.manager.counters.pages_demoted == 1
    server.manager.check()


def test_a_host_that_is_all_in_use_takes_nothing_more() -> None:
    """Pages that sequences hold there cannot be lost; the device's next victims are."""
    server = Server("one pool", 8, 4)
    server.serve(prompt(1, 4)).close()
    server.serve(prompt(2, 8)).close()
    holder = server.manager.open(SCOPE, prompt(1, 4), max_match=32)
    assert holder.matched_tokens == 32
    assert server.manager.usage()[0].host_cached == 0
    server.serve(prompt(3, 8)).close()
    counters = server.manager.counters
    assert (counters.pages_demoted, counters.pages_evicted) == (4, 8)
    assert server.manager.probe(SCOPE, prompt(2, 8)) == 0
    assert holder.prefetch()
    assert server.verify(holder, prompt(1, 4), 32) == 4
    server.manager.check()


def test_priorities_decide_on_the_host_too() -> None:
    rig = Rig("full", 2, host_slots=3)
    for tokens in ([1] * 8, [2] * 8, [3] * 8):
        rig.cache(tokens)
    assert [rig.manager.probe(SCOPE, [number] * 8) for number in (1, 2, 3)] == [4, 8, 8]
    rig.manager.check()


def test_losing_a_page_on_the_host_takes_what_hangs_below_it_on_the_device() -> None:
    """A branch whose stem lies on the host: without the stem it is useless."""
    rig = Rig("full", 4, host_slots=1)
    store = rig.manager._store
    rig.cache([1] * 12)
    tree = store.tree
    stem, middle, _ = tree.walk(rig.manager.prompt(SCOPE, [1] * 12), 3).tolist()
    store._demote(0, tree.pages[0, [stem]])
    rig.manager.check()
    assert rig.manager.probe(SCOPE, [1] * 12) == 12
    store.lose(0, tree.pages[0, [stem]])
    rig.manager.check()
    assert not tree.attached[middle]
    assert rig.manager.probe(SCOPE, [1] * 12) == 0
    assert (rig.manager.usage()[0].free, rig.manager.usage()[0].host_free) == (4, 1)


def test_host_counts_must_fit_the_plan() -> None:
    rig = Rig("mixed, two pool groups", 4)
    memory = Memory(rig.plan, [4, 4], [1, 1])
    for wrong in ((1,), (1, -1)):
        with pytest.raises(ValueError, match="expected host slots for each of 2 pool groups"):
            UnifiedKVCacheManager(rig.plan, [4, 4], memory, incarnation="a", host_slots=wrong)


def test_the_copier_gets_slots_of_each_tier_from_zero() -> None:
    rig = Rig("full", 2, host_slots=2)
    rig.cache([1] * 8)
    rig.cache([2] * 8)
    assert {host for _, _, host in rig.memory.demoted} == {0, 1}
    sequence = rig.open([1] * 9)
    rig.manager.clear()
    assert sequence.prefetch()
    assert {host for _, host, _ in rig.memory.onboarded} == {0, 1}
    assert np.array_equal(np.sort(sequence.block_table(0)), [0, 1])
