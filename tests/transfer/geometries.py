"""Random models, and random instances of two sides that serve one: real layout plans throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
    recurrent_layer,
)
from tests.support.transfers import FACTS
from transfer.identity import Incarnation
from transfer.page_table import DraftShift, append_drafts, page_table_of
from transfer.rank_info import ParallelShape, RankInfo

LONGEST_TOKENS = 40


@dataclass(frozen=True)
class Attention:
    """An attention layer over all ranks. ``index_keys`` adds a replicated INDEX_KEY buffer."""

    heads: int
    dtype: ElementType = ElementType.FLOAT16
    head_dim: int = 4
    kv_factor: int = 2
    window: int | None = None
    sink_tokens: int = 0
    index_keys: bool = False
    policy: ReusePolicy = ReusePolicy.REQUIRED

    @property
    def packed(self) -> bool:
        """Whether it is packed 4-bit data with scales."""
        return self.dtype is ElementType.PACKED4


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer over all ranks: a convolution state in sections of ``units * heads``
    elements, and a recurrent state by head.
    """

    heads: int
    units: tuple[int, ...] = (2, 2)
    dtype: ElementType = ElementType.FLOAT32


Layer = Attention | Recurrent


@dataclass(frozen=True)
class Side:
    """How one instance is started."""

    tp: int = 1
    dp: int = 1
    stages: tuple[int, ...] = (1,)
    cp: int = 1
    drafts: bool = False
    own_draft_pools: bool = False
    page_tokens: int | None = None
    draft_page_tokens: int | None = None
    longest_tokens: int | None = None

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of a sequence."""
        return self.tp // self.dp


@dataclass(frozen=True)
class Geometry:
    """Two instances and the layers that each of them believes to serve."""

    sender: Side
    receiver: Side
    sender_layers: tuple[Layer, ...]
    receiver_layers: tuple[Layer, ...]
    sender_drafts: tuple[Attention, ...]
    receiver_drafts: tuple[Attention, ...]
    tokens_per_block: int = 8

    def senders(self, dp_rank: int) -> list[RankInfo]:
        """Ranks of a data parallel group of the sending instance."""
        return dp_group(
            self.sender, dp_rank, self.sender_layers, self.sender_drafts, self.tokens_per_block
        )

    def receivers(self, dp_rank: int) -> list[RankInfo]:
        """Ranks of a data parallel group of the receiving instance."""
        return dp_group(
            self.receiver,
            dp_rank,
            self.receiver_layers,
            self.receiver_drafts,
            self.tokens_per_block,
        )


def same_model(
    sender: Side,
    receiver: Side,
    layers: Sequence[Layer],
    drafts: Sequence[Attention] = (),
    tokens_per_block: int = 8,
) -> Geometry:
    """Two instances of one model and one drafter."""
    target, drafter = tuple(layers), tuple(drafts)
    return Geometry(sender, receiver, target, target, drafter, drafter, tokens_per_block)


def dp_group(
    side: Side,
    dp_rank: int,
    layers: Sequence[Layer],
    drafts: Sequence[Attention],
    tokens_per_block: int,
) -> list[RankInfo]:
    """Facts of the ranks that share a request, draft layers in the last stage."""
    ranks: list[RankInfo] = []
    start = 0
    for pp_rank, count in enumerate(side.stages):
        held = list(enumerate(layers))[start : start + count]
        start += count
        last = pp_rank == len(side.stages) - 1
        own_drafts = list(enumerate(drafts, len(layers))) if side.drafts and last else []
        for tp_rank in range(dp_rank * side.attention_tp, (dp_rank + 1) * side.attention_tp):
            for cp_rank in range(side.cp):
                shape = ParallelShape(
                    tp_size=side.tp,
                    tp_rank=tp_rank,
                    pp_size=len(side.stages),
                    pp_rank=pp_rank,
                    dp_size=side.dp,
                    dp_rank=dp_rank,
                    cp_size=side.cp,
                    cp_rank=cp_rank,
                )
                rank = Rank(side, shape, tokens_per_block)
                ranks.append(rank.info(len(ranks), held, own_drafts, tuple(drafts)))
    return ranks


@dataclass(frozen=True)
class Rank:
    """Makes the facts of one rank."""

    side: Side
    shape: ParallelShape
    tokens_per_block: int

    def info(
        self,
        number: int,
        layers: list[tuple[int, Layer]],
        drafts: list[tuple[int, Attention]],
        all_drafts: tuple[Attention, ...],
    ) -> RankInfo:
        """Facts of a rank with these numbered layers."""
        targets = [
            self._spec(layer_id, layer, KVCacheLayerOwner.TARGET) for layer_id, layer in layers
        ]
        drafters = [
            self._spec(layer_id, layer, KVCacheLayerOwner.DRAFT) for layer_id, layer in drafts
        ]
        totals = {
            (layer_id, role): total
            for layer_id, layer in [*layers, *drafts]
            for role, total in self._totals(layer).items()
        }
        shared = all_drafts if self.side.drafts else ()
        if self.side.own_draft_pools and drafters:
            plan = self._derive(targets)
            table = append_drafts(
                page_table_of(plan, self.shape, totals),
                page_table_of(self._derive(drafters), self.shape, totals),
                DraftShift.behind(plan),
            )
        else:
            table = page_table_of(self._derive(targets + drafters), self.shape, totals)
        return RankInfo(
            incarnation=Incarnation(instance="x", nonce="0"),
            rank=number,
            shape=self.shape,
            layers_per_stage=self.side.stages,
            tokens_per_block=self.tokens_per_block,
            engine=FACTS,
            num_draft_layers=len(shared) or None,
            draft_kv_dtype="+".join(sorted({layer.dtype.value for layer in shared})) or None,
            page_table=table,
            data_host="127.0.0.1",
            data_port=1,
        )

    def _derive(self, specs: list[KVCacheLayerSpec]) -> LayoutPlan:
        return LayoutPlan.derive(
            specs,
            tokens_per_block=self.tokens_per_block,
            max_sequence_tokens=self.side.longest_tokens,
        )

    def _local(self, heads: int) -> int:
        return max(1, heads // self.shape.attention_tp_size)

    def _spec(self, layer_id: int, layer: Layer, owner: KVCacheLayerOwner) -> KVCacheLayerSpec:
        if isinstance(layer, Recurrent):
            return recurrent_layer(layer_id, owner, self._states(layer))
        draft = owner is KVCacheLayerOwner.DRAFT
        page_tokens = self.side.draft_page_tokens if draft else self.side.page_tokens
        index = BufferSpec(
            role=BufferRole.INDEX_KEY,
            dtype=ElementType.FLOAT8_E4M3,
            num_heads=1,
            elements_per_head=6,
            tokens_per_page=page_tokens,
            coalescing_group=2,
            mapping=PageMapping.REPLICATED,
        )
        return KVCacheLayerSpec(
            layer_id=layer_id,
            owner=owner,
            dtype=layer.dtype,
            num_kv_heads=self._local(layer.heads),
            head_dim=layer.head_dim,
            kv_factor=layer.kv_factor,
            window=layer.window,
            sink_tokens=layer.sink_tokens,
            policy=layer.policy,
            tokens_per_page=page_tokens,
            scale_block_elements=2 if layer.packed else None,
            extra_buffers=(index,) if layer.index_keys else (),
        )

    def _states(self, layer: Recurrent) -> tuple[BufferSpec, ...]:
        sections = tuple(units * self._local(layer.heads) for units in layer.units)
        return (
            BufferSpec(
                role=BufferRole.CONV_STATE,
                dtype=layer.dtype,
                num_heads=1,
                elements_per_head=sum(sections),
                mapping=PageMapping.SECTIONED,
                sections=sections,
            ),
            BufferSpec(
                role=BufferRole.RECURRENT_STATE,
                dtype=ElementType.FLOAT32,
                num_heads=self._local(layer.heads),
                elements_per_head=3,
            ),
        )

    def _totals(self, layer: Layer) -> dict[BufferRole, int]:
        if isinstance(layer, Recurrent):
            shards = min(layer.heads, self.shape.attention_tp_size)
            return {BufferRole.CONV_STATE: shards, BufferRole.RECURRENT_STATE: layer.heads}
        roles = (
            BufferRole.KEY,
            BufferRole.VALUE,
            BufferRole.KEY_SCALE,
            BufferRole.VALUE_SCALE,
        )
        return dict.fromkeys(roles, layer.heads)


UNQUANTISED = (ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32)
DTYPES = (*UNQUANTISED, ElementType.FLOAT8_E4M3, ElementType.PACKED4)


def geometry(random: Random) -> Geometry:
    """Two instances of one model, now and then configured differently."""
    block = random.choice([8, 12])
    tps = _tp(random), _tp(random)
    heads = [count for count in range(1, 9) if all(_spreads(count, tp // dp) for tp, dp in tps)]
    layers = tuple(_layer(random, heads) for _ in range(random.randint(1, 5)))
    sparse = any(isinstance(layer, Attention) and layer.index_keys for layer in layers)
    # Beside sparse layers a draft layer needs a life cycle of its own.
    policies = [ReusePolicy.OPTIONAL] if sparse else [ReusePolicy.OPTIONAL, ReusePolicy.REQUIRED]
    drafts = tuple(_draft(random, heads, policies) for _ in range(random.randint(1, 2)))
    told = random.choice(["both", "both", "both", "none", "sender", "receiver"])
    other_layers, other_drafts = _other(random, layers, drafts)
    sender, receiver = (_side(random, tp, len(layers), block) for tp in tps)
    return Geometry(
        sender=replace(
            sender,
            drafts=told in ("both", "sender"),
            cp=random.choice([1] * 19 + [2]),
        ),
        receiver=replace(receiver, drafts=told in ("both", "receiver")),
        sender_layers=layers,
        receiver_layers=other_layers,
        sender_drafts=drafts,
        receiver_drafts=other_drafts,
        tokens_per_block=block,
    )


def _tp(random: Random) -> tuple[int, int]:
    """Tensor parallel size and data parallel groups in it."""
    tp = random.choice([1, 2, 4, 8, *range(1, 9)])
    return tp, random.choice([1, 1, *(size for size in range(1, tp + 1) if tp % size == 0)])


def _spreads(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


def _layer(random: Random, heads: Sequence[int]) -> Layer:
    kind = random.choice(["dense", "dense", "dense", "window", "latent", "sparse", "state"])
    if kind == "state":
        return Recurrent(
            heads=random.choice(heads),
            units=random.choice([(2, 2), (1, 3), (1, 1, 2), (4,)]),
            dtype=random.choice([ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.PACKED4]),
        )
    if kind == "latent":
        return Attention(heads=1, head_dim=6, kv_factor=1, dtype=random.choice(DTYPES))
    window = random.choice([6, 17, LONGEST_TOKENS]) if kind == "window" else None
    return Attention(
        heads=random.choice(heads),
        dtype=random.choice(DTYPES),
        window=window,
        sink_tokens=random.choice([0, 3, 9]) if window else 0,
        index_keys=kind == "sparse",
    )


def _draft(random: Random, heads: Sequence[int], policies: Sequence[ReusePolicy]) -> Attention:
    return Attention(
        heads=random.choice(heads),
        dtype=random.choice((*UNQUANTISED, ElementType.FLOAT8_E4M3)),
        head_dim=random.choice([4, 6]),
        window=random.choice([None, None, 17]),
        policy=random.choice(policies),
    )


def _other(
    random: Random, layers: tuple[Layer, ...], drafts: tuple[Attention, ...]
) -> tuple[tuple[Layer, ...], tuple[Attention, ...]]:
    """What the receiver has, usually the same."""
    match random.randint(0, 19):
        case 0:
            first = layers[0]
            return (replace(first, dtype=random.choice(UNQUANTISED)), *layers[1:]), drafts
        case 1:
            return layers, (replace(drafts[0], head_dim=8), *drafts[1:])
        case _:
            return layers, drafts


def _side(random: Random, tp: tuple[int, int], num_layers: int, tokens_per_block: int) -> Side:
    """Any shape with at most a dozen ranks a data parallel group."""
    room = 12 // (tp[0] // tp[1])
    cp = random.choice([1] * 4 + [size for size in range(1, 9) if size <= room])
    stages = random.randint(1, max(1, min(4, num_layers, room // cp)))
    cuts = sorted(random.sample(range(1, num_layers), stages - 1))
    divisors = [size for size in range(2, tokens_per_block + 1) if tokens_per_block % size == 0]
    return Side(
        tp=tp[0],
        dp=tp[1],
        stages=tuple(end - start for start, end in pairwise([0, *cuts, num_layers])),
        cp=cp,
        own_draft_pools=random.choice([False, False, True]),
        page_tokens=random.choice([None, None, *divisors]),
        draft_page_tokens=random.choice([None, None, *divisors]),
        longest_tokens=random.choice([None, None, LONGEST_TOKENS]),
    )
