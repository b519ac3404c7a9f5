"""Small kernel pages inside large blocks: the view of the pages that a drafter's kernels have.

A spec with ``tokens_per_page`` lays its pages out so that a block is ``subdivision`` pages of keys,
then as many of values. The view owns nothing: it says where pages are, for all draft layers, and
is derived once from the plan. Page j of slot s has

    key index   s * scale + bias + j        value index   s * scale + bias + j + value_offset

(``value_offset`` is the subdivision where keys and values are neighbours). Missing blocks have the
pages of slot 0, page 0; kernels never read past a sequence's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_core.errors import invariant
from kvcache_core.index_space import IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import BufferRole, IndexKind


@dataclass(frozen=True, kw_only=True)
class SubpageView:
    """The pages of some layers of one layer group, in one pool. ``tokens_per_block`` is a page."""

    layer_ids: tuple[int, ...]
    layer_group: int
    pool_group: int
    pool: int
    tokens_per_block: int
    subdivision: int
    keys: tuple[IndexSpace, ...]
    """One map a layer."""
    value_offset: int | None
    """Pages from a key page to its value page, the same in all layers; None without values."""

    def expand_keys(self, layer_id: int, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Key pages of a layer: int32 ``[..., blocks]`` to ``[..., blocks * subdivision]``."""
        return self.keys[self.layer_ids.index(layer_id)].expand(slots)

    def expand_values(self, layer_id: int, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Value pages of a layer; where a block is missing, page 0 as for keys."""
        if self.value_offset is None:
            raise ValueError(f"layer {layer_id} has keys only")
        indices = self.expand_keys(layer_id, slots)
        missing = np.repeat(slots < 0, self.subdivision, axis=-1)
        return np.where(missing, np.int32(0), indices + np.int32(self.value_offset))

    def describe(self) -> str:
        """One line for the log of the caller."""
        return (
            f"draft subpage view active: draft_layers={list(self.layer_ids)} "
            f"subdiv={self.subdivision} tokens_per_block={self.tokens_per_block}"
        )


def draft_subpage_view(plan: LayoutPlan, tokens_per_page: int) -> SubpageView:
    """The view of all draft layers for kernels that read pages of ``tokens_per_page`` tokens.

    Raises ValueError without draft attention layers, for a page size other than the one in their
    specs, or when they do not lie in one pool.
    """
    drafts = [layer for layer in plan.draft_layer_ids if not plan.spec(layer).is_recurrent]
    if not drafts:
        raise ValueError("the plan has no draft attention layers; there is nothing to view")
    return subpage_view(plan, drafts, tokens_per_page)


def subpage_view(plan: LayoutPlan, layer_ids: Sequence[int], tokens_per_page: int) -> SubpageView:
    """Like :func:`draft_subpage_view`, for any layers."""
    addresses = [plan.address(layer, BufferRole.KEY) for layer in layer_ids]
    for address in addresses:
        if address.geometry.tokens_per_page != tokens_per_page:
            raise ValueError(
                f"kernels read pages of {tokens_per_page} tokens, layer {address.layer_id} has "
                f"pages of {address.geometry.tokens_per_page}; set tokens_per_page in its spec"
            )
    pools = {(entry.layer_group, entry.pool_group, entry.pool) for entry in addresses}
    if len(pools) != 1:
        raise ValueError(
            f"layers {list(layer_ids)} lie in {len(pools)} pools; a sub-page view needs one"
        )
    offsets = {_value_offset(plan, layer) for layer in layer_ids}
    if len(offsets) != 1:
        raise ValueError(f"layers {list(layer_ids)} have values at different distances {offsets}")
    ((layer_group, pool_group, pool),) = pools
    (value_offset,) = offsets
    return SubpageView(
        layer_ids=tuple(layer_ids),
        layer_group=layer_group,
        pool_group=pool_group,
        pool=pool,
        tokens_per_block=tokens_per_page,
        subdivision=plan.tokens_per_block // tokens_per_page,
        keys=tuple(IndexSpace.of(address, IndexKind.PER_LAYER) for address in addresses),
        value_offset=value_offset,
    )


def _value_offset(plan: LayoutPlan, layer_id: int) -> int | None:
    if plan.spec(layer_id).kv_factor == 1:
        return None
    key = IndexSpace.of(plan.address(layer_id, BufferRole.KEY), IndexKind.PER_LAYER)
    value = IndexSpace.of(plan.address(layer_id, BufferRole.VALUE), IndexKind.PER_LAYER)
    invariant(key.scale == value.scale, f"keys and values of layer {layer_id} differ in stride")
    return value.bias - key.bias
