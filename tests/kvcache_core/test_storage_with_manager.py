"""The manager over real pools: bytes survive sharing, copies, eviction, and the way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ElementType, ReusePolicy
from kvcache_core.storage import NarrowingCodec, PageCodec, TorchStorage
from tests.kvcache_core.storage_rig import BLOCK, attention
from tests.support.devices import DEVICES, usable

SCOPE = b"model"
PROMPT_BLOCKS = 5
DEVICE_SLOTS = 13


def mixed_layers() -> LayoutPlan:
    """bf16, key-only fp8, packed 4-bit with scales; a windowed drafter with small pages."""
    return LayoutPlan.derive(
        [
            attention(0, ElementType.BFLOAT16),
            attention(1, ElementType.FLOAT8_E4M3, kv_factor=1),
            attention(2, ElementType.PACKED4, scale_block_elements=8),
            attention(
                10,
                ElementType.BFLOAT16,
                tokens_per_page=4,
                window=9,
                policy=ReusePolicy.OPTIONAL,
            ),
        ],
        tokens_per_block=BLOCK,
    )


class Pages:
    """Writes and verifies the pages of sequences; what a block holds follows from its prefix."""

    def __init__(self, plan: LayoutPlan, storage: TorchStorage, largest: int) -> None:
        self._plan = plan
        self._storage = storage
        self._largest = largest
        """Bytes are 0..largest, so that an element type read back through a codec is exact."""

    def _buffers(self, group: int, slot: int) -> Iterator[tuple[torch.Tensor, int]]:
        for number, ((layer_id, role), address) in enumerate(self._plan.addresses.items()):
            if address.layer_group == group:
                yield self._storage.buffer(layer_id, role)[slot], number

    def _expected(self, view: torch.Tensor, number: int, prefix: Sequence[int]) -> torch.Tensor:
        seed = hash((number, tuple(prefix))) & 0xFFFFFFFF
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, self._largest, view.shape, generator=generator)
        return values.to(view.dtype)

    def write(self, sequence: SequenceCache, tokens: Sequence[int], matched: int) -> None:
        """Write all blocks but the ``matched`` ones, and those too in groups that have none."""
        for group in self._plan.layer_groups:
            table = sequence.block_table(group.id)
            first = matched if group.id in sequence.reused_groups else 0
            for block in range(first, len(table)):
                if table[block] >= 0:
                    for view, number in self._buffers(group.id, int(table[block])):
                        view.copy_(self._expected(view, number, tokens[: (block + 1) * BLOCK]))

    def verify(self, sequence: SequenceCache, tokens: Sequence[int], blocks: int) -> int:
        """Every page of the first ``blocks`` blocks holds its prefix; returns the pages seen."""
        seen = 0
        for group in self._plan.layer_groups:
            if group.id not in sequence.reused_groups:
                continue
            table = sequence.block_table(group.id)
            for block in range(min(blocks, len(table))):
                if table[block] >= 0:
                    seen += 1
                    for view, number in self._buffers(group.id, int(table[block])):
                        expected = self._expected(view, number, tokens[: (block + 1) * BLOCK])
                        assert torch.equal(
                            view.cpu().contiguous().view(torch.uint8),
                            expected.contiguous().view(torch.uint8),
                        ), f"group {group.id} block {block} buffer {number}"
        return seen


def prompts(count: int) -> list[list[int]]:
    """Prompts of PROMPT_BLOCKS blocks; pairs share two blocks and a half."""
    random = np.random.default_rng(3)
    made: list[list[int]] = []
    for number in range(count):
        tokens = random.integers(0, 1000, PROMPT_BLOCKS * BLOCK).tolist()
        shared = made[number - 1][: 2 * BLOCK + BLOCK // 2] if number % 2 else []
        made.append(shared + tokens[len(shared) :])
    return made


def serve_in_a_loop(
    plan: LayoutPlan, device: str, codec: PageCodec | None, largest: int
) -> UnifiedKVCacheManager:
    """Three times the device's pages, served three times round; every reused page is verified."""
    groups = len(plan.pool_groups)
    slots, host_slots = [DEVICE_SLOTS] * groups, [4 * DEVICE_SLOTS] * groups
    storage = TorchStorage(plan, slots, device, host_slots, codec)
    manager = UnifiedKVCacheManager(
        plan, slots, storage, incarnation="worker@0", host_slots=host_slots
    )
    pages = Pages(plan, storage, largest)
    verified = 0
    for _ in range(3):
        for tokens in prompts(8):
            sequence = manager.open(SCOPE, tokens, max_match=len(tokens) - 1)
            matched = sequence.matched_tokens // BLOCK
            assert sequence.grow(len(tokens))
            verified += pages.verify(sequence, tokens, matched)
            pages.write(sequence, tokens, matched)
            sequence.advance(len(tokens))
            sequence.commit(tokens[sequence.committed :])
            sequence.close()
            manager.check()
    assert verified > 40
    return manager


@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_mixed_layers_survive_the_host_tier(device: str) -> None:
    manager = serve_in_a_loop(mixed_layers(), usable(device), None, largest=256)
    counters = manager.counters
    assert counters.pages_demoted > DEVICE_SLOTS
    assert counters.pages_onboarded > 0
    assert counters.host_matched_tokens > 0
    assert counters.pages_copied > 0


@pytest.mark.parametrize("device", DEVICES)
def test_k13_pages_of_one_type_survive_the_host_tier_through_a_codec(device: str) -> None:
    """Whole numbers up to 15 are exact in eight bits at scale 1, whatever they were before."""
    layers = [
        attention(0, ElementType.BFLOAT16),
        attention(1, ElementType.BFLOAT16, kv_factor=1),
        attention(10, ElementType.BFLOAT16, window=9, policy=ReusePolicy.OPTIONAL),
    ]
    plan = LayoutPlan.derive(layers, tokens_per_block=BLOCK)
    codec = NarrowingCodec.of(layers, ElementType.FLOAT8_E4M3)
    manager = serve_in_a_loop(plan, usable(device), codec, largest=16)
    assert manager.counters.pages_onboarded > 0
