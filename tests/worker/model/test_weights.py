"""Weights in safetensors: files in parts, tied embeddings, and every tensor that does not fit by
its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.rounded_kv import WEIGHTS, with_tensors
from worker.model.errors import ModelLoadError
from worker.model.loader import load_model

TinyModel = Callable[[str], Path]
UP = "model.layers.1.mlp.up_proj.weight"


def test_files_in_parts_are_those_of_the_index(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = tiny_model("llama")
    path = with_tensors(whole, tmp_path / "parts", {})
    weights = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, path / file)
    save_file({UP: torch.zeros(80, 48)}, path / "consolidated.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    lines: list[str] = []
    found = load_model(path, progress=lines.append).module.state_dict()
    for name, values in load_model(whole).module.state_dict().items():
        assert torch.equal(found[name], values), name
    size = sum(values.nbytes for values in weights.values()) / 1e6
    (line,) = (line for line in lines if "reading" in line)
    assert re.fullmatch(r"reading weights, (.+) of \1 MB \(100 %\), \d+ MB/s", line)
    assert f" of {size:.0f} MB" in line


def test_what_does_not_fit_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    wrong = {UP: torch.zeros(81, 48), "model.norm.weight": torch.zeros(47)}
    path = with_tensors(tiny_model("llama"), tmp_path / "wrong", wrong)
    weights = load_file(path / WEIGHTS)
    del weights["lm_head.weight"], weights["model.layers.0.self_attn.k_proj.weight"]
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelLoadError) as caught:
        load_model(path)
    for told in (
        "lacks 2 weights: lm_head.weight, model.layers.0.self_attn.k_proj.weight",
        f"{UP}: expected [80, 48], got [81, 48]",
        "model.norm.weight: expected [48], got [47]",
    ):
        assert told in str(caught.value)


def test_what_has_no_place_is_told_and_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    extra = {
        "model.layers.9.mlp.up_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.q_scale": torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),  # known, if not needed
    }
    path = with_tensors(tiny_model("llama"), tmp_path / "extra", extra)
    lines: list[str] = []
    load_model(path, progress=lines.append)
    (line,) = (line for line in lines if "without a place" in line)
    assert line.startswith("2 tensors")
    assert "model.layers.0.self_attn.q_scale, model.layers.9.mlp.up_proj.weight" in line


def test_tied_embeddings(tiny_model: TinyModel) -> None:
    """A model that ties its head lacks none."""
    path = tiny_model("qwen3")
    weights = load_file(path / WEIGHTS)
    assert "lm_head.weight" not in weights
    head = load_model(path).module.get_output_embeddings().weight
    assert torch.equal(head, weights["model.embed_tokens.weight"])


def test_types_that_are_not_read_are_refused_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    tensor = torch.zeros(80, 48).to(torch.float8_e4m3fn)
    path = with_tensors(tiny_model("llama"), tmp_path / "eight", {UP: tensor})
    with pytest.raises(ModelLoadError, match=rf"got {re.escape(UP)} \(F8_E4M3\)"):
        load_model(path)
