"""``python -m kvcache_core.explain SPEC.json [--quota BYTES]``: the layout plan of any specs.

Prints life cycles, pool groups and pools, where each buffer lies, index spaces and lists, views,
and what a quota holds. The format of the file is documented in spec_json.py. Exits with 2 and one
line on stderr when the file does not describe a plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvcache_core.costs import cost_components
from kvcache_core.groups import LayerGroup
from kvcache_core.index_space import IndexSpace
from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing_demand import SizingDemand
from kvcache_core.sizing_ratios import insert_draft_shares
from kvcache_core.spec import BufferRole, IndexKind, KVCacheLayerOwner
from kvcache_core.spec_json import SpecFile, read_spec_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache_core.explain", description="Print the layout plan of layer specs."
    )
    parser.add_argument("spec", type=Path, metavar="SPEC.json")
    parser.add_argument("--quota", type=int, metavar="BYTES", help="wins over the file's")
    parser.add_argument("--host-quota", type=int, metavar="BYTES", help="wins over the file's")
    options = parser.parse_args(arguments)
    try:
        text = explain(read_spec_file(options.spec), options.quota, options.host_quota)
    except (OSError, ValueError) as error:
        print(f"{options.spec}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def explain(
    document: SpecFile, quota_bytes: int | None = None, host_quota_bytes: int | None = None
) -> str:
    """The report. Raises ValueError for specs without a plan, or a quota too small for one."""
    plan = LayoutPlan.derive(
        document.specs,
        tokens_per_block=document.tokens_per_block,
        max_sequence_tokens=document.max_sequence_tokens,
    )
    quota = document.quota_bytes if quota_bytes is None else quota_bytes
    host = document.host_quota_bytes if host_quota_bytes is None else host_quota_bytes
    lines = [*_summary(plan), "", *_groups(plan), "", *_pools(plan), "", *_buffers(plan)]
    lines += ["", *_lists(plan), "", *_views(plan)]
    if quota is not None:
        lines += ["", *_capacity(plan, quota, host, document.demand)]
    return "\n".join(lines)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    yield title
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + line).rstrip()


def _ids(layers: Sequence[int]) -> str:
    """Layer ids as ranges: 0-2,5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _summary(plan: LayoutPlan) -> Iterator[str]:
    cost = cost_components(plan.cost_classes)
    drafts = plan.draft_layer_ids
    longest = plan.max_sequence_tokens
    yield (
        f"{len(plan.specs)} layers, {len(drafts)} of the drafter"
        + (f" ({_ids(drafts)})" if drafts else "")
        + f"; blocks of {plan.tokens_per_block} tokens; "
        + ("sequences of any length" if longest is None else f"sequences of up to {longest} tokens")
    )
    yield (
        f"a token: {cost.token_bytes} bytes, and {cost.windowed_token_bytes} until windows are "
        f"full; a sequence: {cost.window_bytes} bytes of windows, {cost.state_bytes} of states"
    )


def _life_cycle(group: LayerGroup) -> str:
    life_cycle = group.life_cycle
    if life_cycle.is_state:
        return "state"
    if life_cycle.window is None:
        return "full"
    sinks = f" + {life_cycle.sink_blocks} sink blocks" if life_cycle.sink_blocks else ""
    return f"window {life_cycle.window}{sinks}"


def _policy(group: LayerGroup) -> str:
    """The reuse policy, and what else limits reuse."""
    life_cycle = group.life_cycle
    ahead = life_cycle.look_ahead_tokens
    return (
        life_cycle.policy.value
        + (f", looks {ahead} ahead" if ahead else "")
        + (", needs hidden states" if life_cycle.needs_hidden_states else "")
    )


def _groups(plan: LayoutPlan) -> Iterator[str]:
    return _table(
        "layer groups (life cycles)",
        ("id", "life cycle", "policy", "layers", "drafter's", "pool group", "bytes a block"),
        (
            (
                group.id,
                _life_cycle(group),
                _policy(group),
                _ids(group.layer_ids),
                _ids(group.draft_layer_ids) or "-",
                group.pool_group,
                group.bytes_per_slot,
            )
            for group in plan.layer_groups
        ),
    )


def _pools(plan: LayoutPlan) -> Iterator[str]:
    return _table(
        "pools",
        ("pool group", "pool", "bytes a slot", "layer groups"),
        (
            (group.id, pool, slot_bytes, _ids(group.layer_groups))
            for group in plan.pool_groups
            for pool, slot_bytes in enumerate(group.slot_bytes)
        ),
    )


def _space(space: IndexSpace) -> str:
    """index = slot * scale + bias, over units behind a base."""
    pages = f" .. +{space.pages_per_block - 1}" if space.pages_per_block > 1 else ""
    base = f"base + {space.base_offset_bytes}" if space.base_offset_bytes else "base"
    if space.kind is IndexKind.RAW_SLOT:
        return f"slot, {base}"
    bias = f" + {space.bias}" if space.bias else ""
    return f"slot * {space.scale}{bias}{pages}, {base}, unit {space.unit_bytes}"


def _buffers(plan: LayoutPlan) -> Iterator[str]:
    def row(layer_id: int, role: BufferRole) -> Sequence[object]:
        address = plan.address(layer_id, role)
        geometry = address.geometry
        shape = [geometry.num_heads, geometry.tokens_per_page, geometry.elements_per_head]
        pages = f"{geometry.pages_per_block} x " if geometry.pages_per_block > 1 else ""
        return (
            layer_id,
            plan.owner(layer_id).value,
            role.value,
            geometry.dtype.value,
            pages + str([size for size in shape if size]),
            f"{address.pool_group}.{address.pool}",
            address.offset_bytes,
            address.bytes,
            _space(plan.index_space(layer_id, role)),
        )

    return _table(
        "buffers: address = pool base + slot * slot bytes + offset",
        ("layer", "owner", "role", "dtype", "page", "pool", "offset", "bytes", "index space"),
        (row(layer_id, role) for layer_id, role in plan.addresses),
    )


def _lists(plan: LayoutPlan) -> Iterator[str]:
    lists = plan.index_lists(plan.layer_ids)
    if not lists:
        return iter(["index lists: none, every layer takes raw slots"])
    return _table(
        "index lists (one a step for all their layers)",
        ("layer group", "kind", "index", "kv_factor", "value offset", "layers"),
        (
            (
                entry.layer_group,
                entry.key.kind.value,
                f"slot * {entry.key.scale} + {entry.key.bias}",
                entry.key.kv_factor,
                "-" if entry.key.value_offset is None else entry.key.value_offset,
                _ids(entry.layer_ids),
            )
            for entry in lists
        ),
    )


def _views(plan: LayoutPlan) -> Iterator[str]:
    return _table(
        "views (units of transfer)",
        ("id", "owner", "layer group", "pool", "mapping", "buffers", "bytes a block", "moves"),
        (
            (
                view.id,
                view.owner.value,
                view.layer_group,
                f"{view.pool_group}.{view.pool}",
                view.geometry.mapping.value,
                len(view.buffers),
                view.block_bytes,
                _moves(view.owner, transferable=view.transferable, whole_slot=view.whole_slot),
            )
            for view in plan.views
        ),
    )


def _moves(owner: KVCacheLayerOwner, *, transferable: bool, whole_slot: bool) -> str:
    if not transferable:
        return f"never ({owner.value} is private)"
    return "whole slots" if whole_slot else "buffers"


def _capacity(
    plan: LayoutPlan, quota_bytes: int, host_quota_bytes: int, demand: SizingDemand
) -> Iterator[str]:
    estimate = plan.estimate(quota_bytes, demand)
    host = plan.host_slots_for(host_quota_bytes, estimate.slots)
    yield from _table(
        f"quota {quota_bytes} bytes, host {host_quota_bytes} bytes",
        ("pool group", "slots", "bytes", "least slots", "host slots"),
        (
            (group.id, slots, slots * group.bytes_per_slot, floor, below)
            for group, slots, floor, below in zip(
                plan.pool_groups, estimate.slots, estimate.floor_slots, host, strict=True
            )
        ),
    )
    alone = plan.sequence_capacity_tokens(estimate.slots, demand)
    yield (
        f"  holds {estimate.tokens} tokens of history beside {estimate.scratch_tokens} tokens of "
        f"scratch ({estimate.scratch_bytes} bytes); one sequence alone up to {alone} tokens"
    )
    if demand.pool_ratios is not None:
        yield f"  {insert_draft_shares(plan.table, demand.pool_ratios).describe()}"


if __name__ == "__main__":
    sys.exit(main())
