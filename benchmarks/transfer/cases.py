"""What is measured, as values: the model whose pages move, the cases, and which slots they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvcache_core.arithmetic import ceil_div
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec

Way = Literal["default", "staged", "fragmented"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)
Slots = npt.NDArray[np.int32]
GOAL_TOKENS: Final = 8192
"""Goals hold for prompts from this length on."""
PREFILL_ROUNDS: Final = 3
"""Most rounds of a case that no goal is set for."""


@dataclass(frozen=True, slots=True)
class Model:
    """An attention model in bfloat16."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block over all ranks."""
        return 4 * self.layers * self.kv_heads * self.head_dim * self.tokens_per_block

    @property
    def small_page(self) -> int:
        """Tokens of a kernel page where a block has two."""
        return self.tokens_per_block // 2

    @property
    def run_bytes(self) -> int:
        """Keys or values of one head and layer in one small page."""
        return 2 * self.head_dim * self.small_page

    def blocks(self, tokens: int) -> int:
        """Blocks of a prompt."""
        return ceil_div(tokens, self.tokens_per_block)

    def plan(self, tp: int, tokens_per_page: int | None = None) -> LayoutPlan:
        """Layout of one rank of ``tp``; a slot has the same bytes whatever the pages. Raises
        ValueError when heads do not divide.
        """
        if self.kv_heads % tp:
            raise ValueError(f"expected kv heads that divide by tp {tp}, got {self.kv_heads}")
        specs = [
            KVCacheLayerSpec(
                layer_id=layer,
                owner=KVCacheLayerOwner.TARGET,
                dtype=ElementType.BFLOAT16,
                num_kv_heads=self.kv_heads // tp,
                head_dim=self.head_dim,
                tokens_per_page=tokens_per_page,
            )
            for layer in range(self.layers)
        ]
        return LayoutPlan.derive(specs, tokens_per_block=self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tensor parallel ranks of the context and of the generation instance."""

    context: int
    generation: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``2->1``. Raises ValueError."""
        context, arrow, generation = text.partition("->")
        if not arrow:
            raise ValueError(f"expected a shape such as 2->1, got {text!r}")
        return cls(int(context), int(generation))

    @override
    def __str__(self) -> str:
        return f"{self.context}->{self.generation}"

    @property
    def equal(self) -> bool:
        """Whether pages lie alike on both sides."""
        return self.context == self.generation


@dataclass(frozen=True, slots=True)
class Case:
    """``streams`` prompts of ``tokens`` tokens at once."""

    tokens: int
    shape: Shape
    streams: int
    way: Way = "default"
    prefill: bool = False

    @override
    def __str__(self) -> str:
        beside = ", beside a prefill" if self.prefill else ""
        return f"{self.tokens} tokens, tp {self.shape}, {self.streams} at once, {self.way}{beside}"


def cases(
    shape: Shape, tokens: Sequence[int], streams: Sequence[int], *, beside: Sequence[int]
) -> Iterator[Case]:
    """Cases of one pair of instances: quiet ones, other ways, then those beside a prefill.

    ``beside`` are the lengths that are also measured beside a prefill.
    """
    for length in tokens:
        for count in streams:
            yield Case(length, shape, count)
    if shape.equal:
        longest = max((length for length in tokens if length <= GOAL_TOKENS), default=tokens[0])
        yield Case(longest, shape, 1, way="staged")
        yield Case(longest, shape, 1, way="fragmented")
    for length in tokens:
        if length in beside:
            for count in streams:
                yield Case(length, shape, count, prefill=True)


def rounds_of(case: Case, size_bytes: int, *, most: int, most_bytes: float) -> int:
    """At least one, at most ``most`` (fewer beside a prefill), and no more bytes than
    ``most_bytes`` where one round has less.
    """
    most = min(most, PREFILL_ROUNDS) if case.prefill else most
    return max(1, min(most, int(most_bytes // size_bytes)))


def streams_apart(pool_blocks: int, blocks: int, streams: int) -> int:
    """How many of ``streams`` prompts have slots of their own in the pools."""
    return min(streams, pool_blocks // blocks)


def context_slots(pool_blocks: int, blocks: int, stream: int) -> Slots:
    """Slots of a stream's prompt at the context ranks: neighbours."""
    apart = streams_apart(pool_blocks, blocks, stream + 1)
    first = blocks * (stream % apart)
    return np.arange(first, first + blocks, dtype=np.int32)


def generation_slots(pool_blocks: int, sources: Slots, way: Way) -> Slots:
    """Slots for what lies in ``sources`` at the context ranks; a one-to-one map of the whole pool,
    so that streams that share the ones share the others.
    """
    if way != "fragmented":
        return sources
    half = ceil_div(pool_blocks, 2)
    return np.where(sources < half, 2 * sources, 2 * (sources - half) + 1).astype(np.int32)
