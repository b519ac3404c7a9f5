"""benchmarks.attention: its arithmetic, and a run of its tiny cases in the interpreter."""

from __future__ import annotations

import json

import pytest

from benchmarks.attention.__main__ import main
from benchmarks.attention.cases import Case


def test_work_is_counted_over_visible_keys_alone() -> None:
    whole = Case(name="", lengths=((4095, 1),) * 64)
    assert whole.kv_bytes == 2 * 64 * 4096 * 8 * 128 * 2
    assert Case(name="", lengths=((0, 3),), heads=1, kv_heads=1, dim=2).flops == 4 * 6 * 2
    windowed = Case(name="", lengths=((99, 1),), window=10, sinks=4)
    assert windowed.kv_bytes == 14 * 2 * 8 * 128 * 2
    assert [windowed.seen(position) for position in (0, 9, 10, 13, 50)] == [1, 10, 11, 14, 14]


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = {case["case"]: case for case in result["cases"]}
    assert cases.keys() == {"decode", "prefill", "mixed, fp8"}
    for name in ("decode", "prefill"):
        assert cases[name]["largest_difference"] < 0.01
    assert cases["decode"]["gb_s"] >= 0 < result["limits"]["copy_gb_s"]
