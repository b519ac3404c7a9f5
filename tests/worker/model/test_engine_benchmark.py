"""benchmarks.engine runs whole on a tiny model, and gives every figure it promises."""

from __future__ import annotations

import json
import sys

import pytest
import torch

pytest.importorskip("triton")

# Rows that pad a batch hold anything, as on a device; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {"layers": 1, "hidden": 32, "intermediate": 32, "heads": 2, "kv-heads": 1, "vocab": 64}
SHAPE = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON = ["--device", DEVICE, "--dtype", "float32", *SHAPE]
FIGURES = {
    "floor_tok_s",
    "decode_b1_tok_s",
    "prefill_8k_ms",
    "b64_4k_step_ms",
    "cb_64_tok_s",
    "cb_256_tok_s",
    "start_s",
}


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, object]:
    from benchmarks.engine import __main__ as program

    monkeypatch.setattr(sys, "argv", ["engine", *COMMON, *more])
    program.main()
    result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_every_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(monkeypatch, capsys, "--scale", "256")
    assert result["errors"] == {}
    assert all(isinstance(result[name], float) for name in FIGURES)
    assert all(result[name] for name in FIGURES)


def test_kernels_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(monkeypatch, capsys, "--scale", "4096", "--kernels-only")
    best = result["best"]
    assert isinstance(best, dict)
    assert {key.split()[0] for key in best} == {"qkv", "o", "gate_up", "down", "head"}
    assert not [line for line in result["all"] if "error" in line]  # type: ignore[attr-defined]
