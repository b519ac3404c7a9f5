"""benchmarks.engine runs whole on a tiny model, beside its peers, and gives every figure it
promises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.contest import PATIENCE_S, Contest, Entrant, Sample
from benchmarks.engine.figures import OURS, Figures
from benchmarks.engine.selection import Budget, Selection
from benchmarks.engine.shape import ModelShape
from benchmarks.engine.vllm_peer import VLLM, Job, measure
from benchmarks.engine.workloads import KEYS, workloads

pytest.importorskip("triton")

# Rows that pad a batch hold anything, as on a device; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPE = ModelShape(layers=1, hidden=16, intermediate=16, heads=1, kv_heads=1, vocab=16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON = ["--device", DEVICE, "--dtype", "float32"]
COMMON += [f"--{name.replace('_', '-')}={size}" for name, size in vars(SHAPE).items()]
FAKE_VLLM = """
from types import SimpleNamespace as Some

from vllm.sampling_params import RequestOutputKind

__version__ = "0.24.0"
SamplingParams = Some


class LLM:
    def __init__(self, model, load_format, max_model_len, **others):
        assert (load_format, others["enable_prefix_caching"]) == ("dummy", False)
        assert open(model + "/config.json").read()
        self.llm_engine = self
        self.longest = max_model_len
        self.wanted = {}
        print("made an engine")

    def add_request(self, name, prompt, params):
        assert name not in self.wanted, "an id twice at once"
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.longest
        assert params.ignore_eos and params.output_kind is RequestOutputKind.DELTA
        self.wanted[name] = params.max_tokens
        prompts = len(self.wanted)
        BROKEN

    def has_unfinished_requests(self):
        return bool(self.wanted)

    def step(self):
        running = self.wanted
        self.wanted = {name: left - 1 for name, left in running.items() if left > 1}
        return [Some(request_id=name, outputs=[Some(token_ids=[1])]) for name in running]
"""
FAKE_KINDS = """
from enum import Enum

RequestOutputKind = Enum("RequestOutputKind", "CUMULATIVE DELTA FINAL_ONLY")
"""


def fake_python(directory: Path, broken: str = "") -> str:
    """A Python that has something like vLLM."""
    package = directory / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_VLLM.replace("BROKEN", broken))
    (package / "sampling_params.py").write_text(FAKE_KINDS)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def job(python: str, limit_s: float = 60) -> Job:
    return Job(
        python=python,
        shape=SHAPE,
        dtype="bfloat16",
        workloads=workloads(64),
        keys=Selection([]).keys(VLLM),
        rounds=2,
        rest_s=0.01,
        memory_share=0.5,
        limit_s=limit_s,
    )


def run(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    from benchmarks.engine.__main__ import main

    main([*COMMON, *more])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_every_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ("--scale", "256", "--rounds", "1", "--vllm-python", fake_python(tmp_path))
    result = run(capsys, *more)
    vllm, transformers = result["vllm"], result["transformers"]
    usual = set(KEYS) - {"decode_b1_compiled_tok_s"}
    assert (result["absent"], vllm["absent"]) == ({}, {})
    assert set(transformers["absent"]) == {"start_s", "cb_256_tok_s"}
    wanted = {"vllm": usual, "transformers": set(KEYS) - set(transformers["absent"])}
    assert all(result[name] > 0 for name in (*usual, "floor_tok_s"))
    assert all(result[side][key] > 0 for side, keys in wanted.items() for key in keys)
    assert transformers["start_s"] is None
    assert vllm["version"] == "0.24.0"
    assert [limits["when"] for limits in result["limits"]] == [
        "start",
        "before vllm",
        "after vllm",
    ]


def test_kernels_only(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--kernels-only")
    assert {key.split()[0] for key in result["best"]} == {"qkv", "o", "gate_up", "down", "head"}
    assert not [line for line in result["all"] if "error" in line]


def test_a_peer_that_is_not_there_is_null_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = run(capsys, "--only", "vllm")["vllm"]
    assert absent["decode_b1_tok_s"] is None
    assert "--vllm-python" in absent["absent"]["decode_b1_tok_s"]
    figures = Figures()
    measure(job(str(tmp_path / "nowhere")), figures)
    assert "FileNotFoundError" in figures.result(None)["vllm"]["absent"]["start_s"]


def test_figures_are_worth_having_without_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError(f"{device.type} is gone")

    monkeypatch.setattr("benchmarks.limits.measure", fails)
    more = ("--only", "vllm.start_s", "--vllm-python", fake_python(tmp_path))
    result = run(capsys, *more)
    assert result["vllm"]["start_s"] > 0
    assert result["floor_tok_s"] is None
    assert result["limits"][0]["error"] == f"RuntimeError: {DEVICE} is gone"


def test_one_part_of_vllm_fails_alone(tmp_path: Path) -> None:
    broken = "assert prompts != 4, 'too many'"
    figures = Figures()
    measure(job(fake_python(tmp_path, broken)), figures)
    found = figures.result(None)["vllm"]
    assert found["absent"] == {"cb_256_tok_s": "AssertionError: too many"}
    assert found["cb_256_tok_s"] is None
    assert found["cb_64_tok_s"] > 0 < found["start_s"]


def test_vllm_dies(tmp_path: Path) -> None:
    broken = "import os; print('no memory', flush=True); prompts == 4 and os._exit(3)"
    figures = Figures()
    measure(job(fake_python(tmp_path, broken)), figures)
    found = figures.result(None)["vllm"]
    assert found["absent"].keys() == {"cb_256_tok_s"}
    assert "ended with 3" in found["absent"]["cb_256_tok_s"]
    assert "no memory" in found["absent"]["cb_256_tok_s"]


def test_vllm_is_ended_when_time_is_up(tmp_path: Path) -> None:
    hangs = "import threading; threading.Event().wait()"
    figures = Figures()
    measure(job(fake_python(tmp_path, hangs), limit_s=0.2), figures)
    found = figures.result(None)["vllm"]
    assert found["absent"].keys() == set(job("").keys)
    assert "--budget-s" in found["absent"]["decode_b1_tok_s"]


def test_selection() -> None:
    everything = Selection([])
    assert everything.has("vllm", "cb_256_tok_s")
    assert not everything.has("transformers", "cb_256_tok_s")
    assert not everything.has("vllm", "decode_b1_compiled_tok_s")
    some = Selection(["transformers.cb_256_tok_s", "start_s"])
    assert some.keys("transformers") == ["cb_256_tok_s"]
    assert some.keys("vllm") == some.keys(OURS) == ["start_s"]
    assert "vllm.prefill_8k_ms" in some.left_out("vllm")["prefill_8k_ms"]
    for unknown in ("prefill", "vllm.decode_b1_compiled_tok_s"):
        with pytest.raises(ValueError, match=unknown):
            Selection([unknown])


def entrant(side: str, samples: list[float], story: list[str]) -> Entrant:
    """Gives these samples, and fails when there are no more."""

    def sample() -> float:
        story.append(side)
        return samples.pop(0)

    @contextmanager
    def ready() -> Iterator[Sample]:
        yield sample
        story.append(f"{side} over")

    return Entrant(side, "prefill_8k_ms", ready)


def contest(figures: Figures, budget_s: float = 1e6) -> Contest:
    return Contest(figures, Selection([]), Budget(budget_s), 3, rest_s=0.0)


def test_sides_take_turns() -> None:
    figures, story = Figures(), list[str]()
    contest(figures).run(
        [
            entrant(OURS, [3, 1, 2], story),
            entrant("vllm", [5], story),
            entrant("transformers", [7, 8, 9], story),
        ]
    )
    result = figures.result(None)
    assert result["prefill_8k_ms"] == 2
    assert result["transformers"]["prefill_8k_ms"] == 8
    assert "IndexError" in result["vllm"]["absent"]["prefill_8k_ms"]
    assert result["vllm"]["prefill_8k_ms"] is None
    turns = [line for line in story if " " not in line]
    assert turns == [OURS, "vllm", "transformers"] * 2 + [OURS, "transformers"]
    assert story[-3:] == ["transformers over", "vllm over", f"{OURS} over"]


def test_a_device_rests_before_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    story = list[str]()
    monkeypatch.setattr("time.sleep", lambda seconds: story.append(f"rest {seconds}"))
    figures = Figures()
    Contest(figures, Selection([]), Budget(1e6), 2, rest_s=0.5).run(
        [entrant(OURS, [3, 1], story), entrant("transformers", [7, 8], story)]
    )
    assert story[:-2] == ["rest 0.5", OURS, "rest 0.5", "transformers"] * 2


def test_a_slow_side_takes_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engine.contest.PATIENCE_S", 0.0)
    assert PATIENCE_S > 0
    figures, story = Figures(), list[str]()
    contest(figures).run([entrant(OURS, [3, 1], story)])
    assert figures.result(None)["prefill_8k_ms"] == 3


def test_no_part_begins_after_the_budget() -> None:
    figures, story = Figures(), list[str]()
    contest(figures, budget_s=0).run([entrant(OURS, [3], story)])
    assert story == []
    assert "--budget-s 0" in figures.result(None)["absent"]["prefill_8k_ms"]
