"""What a rank tells its peers about itself, once, before any page moves.

Everything that decides whether and how pages map from one rank to another is here, and nothing
else is consulted: ``check_peer`` and ``TransferPlan`` are functions of two of these values. Facts
of the draft layers are absent from the wire when there are no shared draft layers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from transfer.identity import Incarnation
from transfer.wire import PROTOCOL_VERSION, Message

Owner = Literal["target", "draft"]


class PageBuffer(Message):
    """Pages of one role of one layer: bytes ``[offset_bytes, offset_bytes + size_bytes)`` of a
    slot of ``pool``.
    """

    layer_id: int = Field(ge=0)
    """Counted over the whole model, not over a pipeline stage."""
    role: str
    pool: int = Field(ge=0)
    offset_bytes: int = Field(ge=0)
    size_bytes: int = Field(ge=1)


class PageView(Message):
    """Unit of transfer: pages of one owner in one layer group that share a geometry."""

    owner: Owner
    layer_group: int = Field(ge=0)
    num_kv_heads: int = Field(ge=0)
    """On this rank."""
    head_dim: int = Field(ge=0)
    element: str
    tokens_per_page: int = Field(ge=0)
    """0 for state of fixed size."""
    buffers: tuple[PageBuffer, ...]


class PageGroup(Message):
    """One layer group: which blocks live, and the pools that hold its slots."""

    layer_group: int = Field(ge=0)
    life_cycle: str
    """Canonical text of kind, window, sinks and policy; equal text means equal liveness of blocks.
    """
    pool_group: int = Field(ge=0)
    slot_bytes: tuple[int, ...]
    """One a pool of the pool group."""


class PageTable(Message):
    """Layout of a rank's pages, derived from its layout plan."""

    groups: tuple[PageGroup, ...]
    views: tuple[PageView, ...]


class ParallelShape(Message):
    """Sizes of the instance and this rank's place in it. dp is the number of attention data
    parallel groups.
    """

    tp_size: int = Field(default=1, ge=1)
    tp_rank: int = Field(default=0, ge=0)
    pp_size: int = Field(default=1, ge=1)
    pp_rank: int = Field(default=0, ge=0)
    dp_size: int = Field(default=1, ge=1)
    dp_rank: int = Field(default=0, ge=0)
    cp_size: int = Field(default=1, ge=1)
    cp_rank: int = Field(default=0, ge=0)


class EngineFacts(Message):
    """Facts that change the numbers inside a page: unequal facts mean pages that the peer would
    misread.
    """

    model: str
    model_hash: str
    """Digest of the configuration and weights index, so that two revisions under one name do not
    pair.
    """
    rope: tuple[tuple[str, str], ...]
    """Sorted (name, value) pairs; values in canonical text."""
    kv_dtype: str
    kv_scales: str = "none"
    """How quantised KV is scaled: ``none``, or a canonical text of granularity and scale dtype."""
    attention: Literal["grouped", "latent"]


class RankInfo(Message):
    """One rank of one incarnation."""

    protocol: int = PROTOCOL_VERSION
    incarnation: Incarnation
    rank: int = Field(ge=0)
    shape: ParallelShape
    layers_per_stage: tuple[int, ...]
    """Target layers of each pipeline stage, in order."""
    tokens_per_block: int = Field(ge=1)
    engine: EngineFacts
    num_draft_layers: int | None = Field(default=None, ge=1)
    draft_kv_dtype: str | None = None
    page_table: PageTable
    data_host: str
    """Where this rank's data listener accepts endpoints."""
    data_port: int = Field(ge=0, lt=1 << 16)

    @model_serializer(mode="wrap")
    def _omit_absent_draft(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("num_draft_layers", "draft_kv_dtype")
        }
