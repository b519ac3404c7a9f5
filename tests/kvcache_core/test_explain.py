"""The report on a plan, and the errors of a file that describes none."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.explain import explain, main
from kvcache_core.layout import LayoutPlan
from kvcache_core.sizing_demand import BatchStep, SizingDemand
from kvcache_core.spec import BufferRole, BufferSpec, IndexKind, KVCacheLayerSpec
from kvcache_core.spec_json import SpecFileError, parse_spec, read_spec_file
from tests.kvcache_core.samples import DRAFT, FP8, OPTIONAL, PACKED4, TARGET

MIXED = Path(__file__).parent / "data" / "mixed.json"


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(MIXED.read_text())
    return loaded


def test_the_mixed_example_has_everything() -> None:
    """fp8, packed with index keys, key-only, a window with sinks, states, a windowed drafter."""
    parsed = read_spec_file(MIXED)
    plan = LayoutPlan.derive(
        parsed.specs,
        tokens_per_block=parsed.tokens_per_block,
        max_sequence_tokens=parsed.max_sequence_tokens,
    )
    assert plan.layer_ids == tuple(range(9))
    assert {buffer.role for spec in plan.specs for buffer in spec.buffers} == set(BufferRole)
    assert (plan.spec(0).dtype, plan.spec(2).dtype) == (FP8, PACKED4)
    assert (plan.spec(8).owner, plan.spec(8).policy) == (DRAFT, OPTIONAL)
    assert plan.spec(8).index_kind is IndexKind.PER_LAYER
    assert plan.index_space(8, BufferRole.VALUE).bias == 12
    assert [group.layer_ids for group in plan.layer_groups] == [
        (0, 1, 2, 3, 4),
        (5,),
        (6,),
        (7, 8),
    ]
    assert parsed.demand == SizingDemand(
        chunk_tokens=2048,
        resident_sequences=16,
        typical_sequence_tokens=16384,
        append_tokens=4,
        scratch_tokens=4,
        preemption_headroom=2,
        dummy_sequences=1,
        snapshot_interval_tokens=8192,
        usable_percent=97,
    )


def test_the_report_says_what_the_plan_says() -> None:
    """Every number of the report is the plan's own."""
    parsed = read_spec_file(MIXED)
    plan = LayoutPlan.derive(
        parsed.specs,
        tokens_per_block=parsed.tokens_per_block,
        max_sequence_tokens=parsed.max_sequence_tokens,
    )
    quota = 1 << 31
    report = explain(parsed, quota)
    rows = [line.split() for line in report.splitlines()]
    for (layer, role), address in plan.addresses.items():
        place = f"{address.pool_group}.{address.pool}"
        found = [row for row in rows if row[:1] == [str(layer)] and role.value in row[:3]]
        assert len(found) == 1, (layer, role)
        assert found[0][found[0].index(place) + 1 :][:2] == [
            str(address.offset_bytes),
            str(address.bytes),
        ]
    estimate = plan.estimate(quota, parsed.demand)
    host = plan.host_slots_for(parsed.host_quota_bytes, estimate.slots)
    start = next(i for i, line in enumerate(report.splitlines()) if line.startswith("quota"))
    for group, row in zip(plan.pool_groups, rows[start + 2 :], strict=False):
        expected = (
            group.id,
            estimate.slots[group.id],
            estimate.slots[group.id] * group.bytes_per_slot,
            estimate.floor_slots[group.id],
            host[group.id],
        )
        assert row == [str(value) for value in expected]
    assert f"holds {estimate.tokens} tokens of history" in report
    for part in (
        "window 1024 + 1 sink blocks",
        "slot * 16 + 12 .. +3, base, unit 16384",
        "slot, base + 65536",
        "whole slots",
        "9 layers, 2 of the drafter (7-8); blocks of 128 tokens",
    ):
        assert part in report


def test_the_command_prints_and_fails_clearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(MIXED), "--quota", "1073741824", "--host-quota", "0"]) == 0
    assert "quota 1073741824 bytes, host 0 bytes" in capsys.readouterr().out
    assert main([str(MIXED), "--quota", "1000"]) == 2
    assert "raise the cache bytes" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"layers": [}')
    assert main([str(broken)]) == 2
    assert "line 1 column 13" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_core.explain", str(MIXED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("9 layers, 2 of the drafter")


WRONG: list[tuple[list[str | int], Any, str]] = [
    (["tokens_per_block"], "64", 'tokens_per_block: expected an integer, got "64"'),
    (["tokens_per_block"], None, "tokens_per_block: expected an integer, got null"),
    (["layers"], {}, r"layers: expected a list, got \{\}"),
    (["layers"], [], "layers: expected at least one layer"),
    (["layers", 2, "dtype"], "bf16", r"layers\[2\].dtype: expected one of \['float32', .*\"bf16\""),
    (["layers", 2, "window_tokens"], 3, r"layers\[2\].window_tokens: unknown field of a layer$"),
    (
        ["layers", 4, "window"],
        3,
        r"layers\[4\].window: unknown field of a layer with state_buffers",
    ),
    (["layers", 2, "head_dim"], True, r"layers\[2\].head_dim: expected an integer, got true"),
    (["layers", 2, "kv_factor"], 3, r"layers\[2\]: layer 4 \(target\): kv_factor must be 1"),
    (["layers", 0, "layer_ids", 1], 1.5, r"layers\[0\].layer_ids\[1\]: expected an integer, got 1"),
    (["layers", 5], 7, r"layers\[5\]: expected an object, got 7"),
    (
        ["layers", 1, "extra_buffers", 0, "role"],
        "index",
        r"layers\[1\].extra_buffers\[0\].role: expected one of",
    ),
    (
        ["layers", 4, "state_buffers", 0, "sections"],
        [1, 2],
        r"layers\[4\].state_buffers\[0\]: conv_state buffer: sections sum to 3",
    ),
    (["demand", "chunk_tokens"], 0, "demand: chunk_tokens must be at least 1, got 0"),
    (["demand", "pool_ratios"], [1, "x"], r"demand.pool_ratios\[1\]: expected a number"),
    (
        ["demand", "typical_step"],
        [[1]],
        r"demand.typical_step\[0\]: expected \[capacity, history\]",
    ),
    (["demand", "typical_step"], [[1, 2]], "demand.typical_step: expected 0 <= history"),
    (["layers", 2, "needs_hidden_states"], 1, "needs_hidden_states: expected true or false, got 1"),
    (["quota"], 5, "quota: unknown field"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_errors_name_the_path(path: list[str | int], value: Any, message: str) -> None:
    broken = copy.deepcopy(document())
    at: Any = broken
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(SpecFileError, match=message):
        parse_spec(broken)


def test_missing_fields_are_named() -> None:
    broken = document()
    del broken["layers"][3]["num_kv_heads"]
    with pytest.raises(SpecFileError, match=r"^layers\[3\].num_kv_heads: missing$"):
        parse_spec(broken)
    del broken["layers"][3]["layer_id"]
    with pytest.raises(SpecFileError, match=r"layers\[3\].layer_id: missing"):
        parse_spec(broken)
    with pytest.raises(SpecFileError, match="expected an object, got 3"):
        parse_spec(3)


def test_every_field_of_a_spec_can_be_said() -> None:
    """A field that the format forgets would be an unknown one."""
    extra = {
        "role": "index_key",
        "dtype": "bfloat16",
        "num_heads": 1,
        "elements_per_head": 8,
        "tokens_per_page": 16,
        "coalescing_group": 3,
        "mapping": "sectioned",
        "sections": [4, 4],
    }
    entry = {
        "layer_id": 3,
        "owner": "target",
        "dtype": "packed4",
        "num_kv_heads": 4,
        "head_dim": 128,
        "kv_factor": 1,
        "window": 100,
        "sink_tokens": 5,
        "policy": "optional",
        "look_ahead_tokens": 2,
        "needs_hidden_states": True,
        "coalescing_group": 4,
        "tokens_per_page": 32,
        "scale_block_elements": 32,
        "scale_coalescing_group": 5,
        "index_kind": "shared",
        "extra_buffers": [extra],
    }
    names = {field.name for field in fields(KVCacheLayerSpec)}
    assert set(entry) == names - {"state_buffers"}
    assert set(extra) == {field.name for field in fields(BufferSpec)}
    parsed = parse_spec({"tokens_per_block": 64, "layers": [entry]})
    (spec,) = parsed.specs
    for name in names - {"owner", "dtype", "policy", "index_kind", "extra_buffers"}:
        assert getattr(spec, name) == entry.get(name, ()), name
    assert (spec.owner, spec.dtype, spec.policy) == (TARGET, PACKED4, OPTIONAL)
    assert spec.index_kind is IndexKind.SHARED
    assert spec.extra_buffers[0].sections == (4, 4)
    assert "optional, looks 2 ahead, needs hidden states" in explain(parsed)
    state = {"layer_id": 0, "owner": "draft", "policy": "private", "look_ahead_tokens": 1}
    buffers = [{**extra, "role": "conv_state", "tokens_per_page": None}]
    (recurrent,) = parse_spec(
        {"tokens_per_block": 64, "layers": [{**state, "state_buffers": buffers}]}
    ).specs
    assert (recurrent.look_ahead_tokens, recurrent.owner) == (1, DRAFT)


def test_steps_and_shares_are_read() -> None:
    changed = document()
    changed["demand"] = {
        "pool_ratios": [1, 1, 0.5],
        "constraints": [[[4096, 0]], [[10, 9], [20, 19]]],
    }
    parsed = parse_spec(changed)
    assert parsed.demand == SizingDemand(
        pool_ratios=(1.0, 1.0, 0.5),
        constraints=(BatchStep(((4096, 0),)), BatchStep(((10, 9), (20, 19)))),
    )
    assert "inserted for layer groups [3]" in explain(parsed)
    del changed["demand"]
    assert parse_spec(changed).demand == SizingDemand()
