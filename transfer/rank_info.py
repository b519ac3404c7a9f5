"""What a rank tells its peers about itself, once, before any page moves.

Everything that decides whether and how pages map from one rank to another is here, and nothing else
is consulted: ``check_peer`` and ``TransferPlan`` are functions of two of these values. Facts of the
draft layers are absent from the wire when there are no shared draft layers, as is the ability to
stage when there is none, and the size of its messages where it is the usual one. Fields that this
release does not know are ignored, so that a later one may add facts that old peers need not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from transfer.identity import Incarnation, RankId
from transfer.staged_cut import STAGING_MESSAGE_BYTES
from transfer.wire import PROTOCOL_VERSION, Message

Owner = Literal["target", "draft"]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Size = Annotated[int, Field(ge=1, lt=1 << 31)]
Bytes = Annotated[int, Field(ge=1, lt=1 << 48)]
Ranks = Annotated[int, Field(ge=1, le=1 << 12)]
"""Of one kind in an instance. Plans go through all ranks, so no peer may claim any number."""
Heads = Annotated[int, Field(ge=1, le=1 << 16)]
Pages = Annotated[int, Field(ge=1, le=1 << 16)]
"""Plans go through these, too."""


OMITTED: Final[dict[str, object]] = {
    "num_draft_layers": None,
    "draft_kv_dtype": None,
    "can_stage": False,
    "staging_message_bytes": STAGING_MESSAGE_BYTES,
}
"""Values that are not sent: whoever reads nothing assumes them."""


class RankFacts(Message):
    """Base of everything in a ``RankInfo``: unknown fields are ignored when it is read."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class PageBuffer(RankFacts):
    """Pages of one role of one layer, ``size_bytes`` from ``offset_bytes`` of each slot."""

    layer_id: Count
    """Counted over the whole model, not over a pipeline stage."""
    role: str
    offset_bytes: Annotated[int, Field(ge=0, lt=1 << 48)]
    size_bytes: Bytes


class PageView(RankFacts):
    """Unit of transfer: buffers of one owner in one layer group, in one pool, of one geometry.

    A page is ``[num_heads, max(tokens_per_page, 1), elements_per_head]``; the pages of a block
    follow each other at ``page_stride_bytes``.
    """

    owner: Owner
    layer_group: Count
    pool: Count
    mapping: str
    """How pages split between ranks: ``head_major``, ``replicated`` or ``sectioned``."""
    element: str
    num_heads: Heads
    """Heads on this rank, the first of which is ``first_head`` of ``total_heads``."""
    first_head: Count
    total_heads: Heads
    elements_per_head: Size
    tokens_per_page: Count
    """0 for state of fixed size."""
    pages_per_block: Pages
    page_bytes: Bytes
    page_stride_bytes: Bytes
    sections: tuple[Count, ...] = ()
    buffers: tuple[PageBuffer, ...]


class PageGroup(RankFacts):
    """One layer group: which blocks live, and the pools that hold its slots."""

    layer_group: Count
    kind: str
    """``attention`` (a page a block) or ``state`` (a page a sequence)."""
    window: Count | None
    sink_blocks: Count
    pool_group: Count
    slot_bytes: tuple[Bytes, ...]
    """One a pool of the pool group."""


class PageTable(RankFacts):
    """Layout of a rank's transferable pages."""

    groups: tuple[PageGroup, ...]
    views: tuple[PageView, ...]

    def group(self, layer_group: int) -> PageGroup:
        """The group with this id. Raises KeyError."""
        for group in self.groups:
            if group.layer_group == layer_group:
                return group
        raise KeyError(f"page table has no layer group {layer_group}")

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Draft layers with pages in this table, ascending."""
        return tuple(
            sorted(
                {
                    buffer.layer_id
                    for view in self.views
                    if view.owner == "draft"
                    for buffer in view.buffers
                }
            )
        )

    @model_validator(mode="after")
    def _check_references(self) -> PageTable:
        pools = {group.layer_group: len(group.slot_bytes) for group in self.groups}
        for view in self.views:
            if view.pool >= pools.get(view.layer_group, 0):
                raise ValueError(
                    f"page table: view of layer group {view.layer_group} pool {view.pool} names "
                    "a pool that no group has"
                )
        return self


class ParallelShape(RankFacts):
    """Sizes of the instance and this rank's place in it.

    ``dp`` counts attention data parallel groups inside ``tp``: attention heads are split over
    ``tp_size / dp_size`` neighbouring ranks, and a request lives in one such group.
    """

    tp_size: Ranks = 1
    tp_rank: Count = 0
    pp_size: Ranks = 1
    pp_rank: Count = 0
    dp_size: Ranks = 1
    dp_rank: Count = 0
    cp_size: Ranks = 1
    cp_rank: Count = 0

    @property
    def attention_tp_size(self) -> int:
        """Ranks that share the heads of one sequence."""
        return self.tp_size // self.dp_size

    @property
    def attention_tp_rank(self) -> int:
        """This rank's place among them."""
        return self.tp_rank % self.attention_tp_size

    @property
    def leads(self) -> bool:
        """Whether this is the leader of its dp group: the rank that has the first tokens."""
        return self.pp_rank == self.attention_tp_rank == self.cp_rank == 0

    @model_validator(mode="after")
    def _check_ranks(self) -> ParallelShape:
        for name, rank, size in (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("dp", self.dp_rank, self.dp_size),
            ("cp", self.cp_rank, self.cp_size),
        ):
            if rank >= size:
                raise ValueError(f"{name}_rank {rank} is not below {name}_size {size}")
        if self.tp_size % self.dp_size:
            raise ValueError(f"dp_size {self.dp_size} does not divide tp_size {self.tp_size}")
        if self.dp_rank != self.tp_rank // self.attention_tp_size:
            raise ValueError(
                f"tp_rank {self.tp_rank} is in dp group {self.tp_rank // self.attention_tp_size}, "
                f"got dp_rank {self.dp_rank}; groups are neighbouring tp ranks"
            )
        return self


class EngineFacts(RankFacts):
    """Facts that change the numbers inside a page: where they differ a peer misreads pages."""

    model: str
    model_hash: str
    """Digest of configuration and weights index: two revisions under one name do not pair."""
    rope: tuple[tuple[str, str], ...]
    """Sorted (name, value) pairs; values in canonical text."""
    kv_dtype: str
    kv_scales: str = "none"
    """How quantised KV is scaled: ``none``, or canonical text of granularity and scale dtype."""
    attention: Literal["grouped", "latent"]


class RankInfo(RankFacts):
    """One rank of one incarnation."""

    protocol: Count = PROTOCOL_VERSION
    incarnation: Incarnation
    rank: Count
    shape: ParallelShape
    layers_per_stage: tuple[Count, ...]
    """Target layers of each pipeline stage, in order."""
    tokens_per_block: Size
    engine: EngineFacts
    num_draft_layers: int | None = Field(default=None, ge=1)
    """Draft layers that all ranks of the instance together share with peers; None without any."""
    draft_kv_dtype: str | None = None
    can_stage: bool = False
    """Whether its memory can gather and scatter pages. Told by the agent, of the memory it has."""
    staging_message_bytes: Size = STAGING_MESSAGE_BYTES
    """Most bytes of a staged message of more than one block that suits this memory."""
    page_table: PageTable
    data_host: str
    """Where this rank's data listener accepts endpoints."""
    data_port: int = Field(ge=0, lt=1 << 16)

    @property
    def rank_id(self) -> RankId:
        """Who this is."""
        return RankId(self.incarnation, self.rank)

    @model_validator(mode="after")
    def _check_stages(self) -> RankInfo:
        if len(self.layers_per_stage) != self.shape.pp_size:
            raise ValueError(
                f"layers_per_stage has {len(self.layers_per_stage)} entries, "
                f"pp_size is {self.shape.pp_size}"
            )
        if (self.num_draft_layers is None) != (self.draft_kv_dtype is None):
            raise ValueError("num_draft_layers and draft_kv_dtype come together or not at all")
        return self

    @model_serializer(mode="wrap")
    def _omit_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in fields.items()
            if name not in OMITTED or value != OMITTED[name]
        }
