"""Loading: facts of each family, and errors that say what is wrong before anything is loaded."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_core.spec import ElementType, KVCacheLayerOwner
from tests.support.models import FAMILIES, WINDOW
from worker.model.errors import ModelLoadError
from worker.model.families import describe
from worker.model.gguf_header import read_gguf_header
from worker.model.loader import load_model, quiet_transformers
from worker.model.source import locate

TinyModel = Callable[[str], Path]

WINDOWS = {
    "llama": (None, None, None),
    "qwen2": (None, WINDOW, WINDOW),
    "qwen3": (None, None, None),
    "mistral": (WINDOW, WINDOW, WINDOW),
    "gemma3_text": (WINDOW, None, WINDOW),
    "mixtral": (None, None, None),
    "qwen3_moe": (WINDOW, WINDOW, WINDOW),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_every_family(tiny_model: TinyModel, family: str) -> None:
    messages: list[str] = []
    loaded = load_model(tiny_model(family), progress=messages.append)
    assert loaded.facts.family == family
    assert tuple(spec.window for spec in loaded.specs) == WINDOWS[family]
    assert [spec.layer_id for spec in loaded.specs] == [0, 1, 2]
    for spec in loaded.specs:
        assert (spec.num_kv_heads, spec.head_dim, spec.kv_factor) == (2, 16, 2)
        assert spec.dtype is ElementType.FLOAT32
        assert spec.owner is KVCacheLayerOwner.TARGET
    assert loaded.vocab_size == 288
    assert loaded.max_position_tokens == 512
    assert loaded.eos_token_ids == (257,)
    assert loaded.dtype == torch.float32
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert messages[0].startswith(f"loading {family}")
    assert messages[-1].startswith(f"loaded {family}")


def test_what_a_module_does_not_read_changes_nothing() -> None:
    """Configurations keep values of other families, which transformers' module does not look at."""
    llama, mistral = FAMILIES["llama"]().to_dict(), FAMILIES["mistral"]().to_dict()
    assert describe({**llama, "sliding_window": 8}).windows == WINDOWS["llama"]
    kinds = ["full_attention"] * 3
    assert describe({**mistral, "layer_types": kinds}).windows == WINDOWS["mistral"]


def test_dtype_is_applied_to_weights_and_pages(tiny_model: TinyModel) -> None:
    loaded = load_model(tiny_model("llama"), dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert {spec.dtype for spec in loaded.specs} == {ElementType.BFLOAT16}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="found nothing"):
        load_model(tmp_path / "nowhere")


def test_directory_without_config(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"expected config\.json.*some\.gguf"):
        load_model(tmp_path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="expected a GGUF file or a directory"):
        load_model(tmp_path / "weights.bin")


def test_a_part_of_a_split_gguf(tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="several parts"):
        load_model(part)


@pytest.fixture
def broken(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a tiny model to break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "broken"))


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("family", "hint"),
    [("gpt2", "positions are not rotary"), ("gemma3", "text-only variant, gemma3_text")],
)
def test_unknown_family(broken: Path, family: str, hint: str) -> None:
    edit_config(broken, model_type=family)
    with pytest.raises(ModelLoadError, match=f"'{family}' is not supported.*{hint}"):
        load_model(broken)


def test_config_that_is_no_json(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="unreadable JSON"):
        load_model(broken)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_scaling_that_depends_on_the_batch(broken: Path, rope_type: str) -> None:
    config = FAMILIES["llama"]().to_dict()
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelLoadError, match=f"rotary scaling '{rope_type}'"):
        describe(config)


def test_unknown_layer_type() -> None:
    config = FAMILIES["gemma3_text"]().to_dict()
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match="layer 1 has type 'linear_attention'"):
        describe(config)


def test_missing_weight_files(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="found neither"):
        load_model(broken)
    (broken / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickled weights"):
        load_model(broken)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"missing: model-00001-of-00002\.safetensors"):
        load_model(broken)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(broken: Path, keep: int) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_model(broken)


def test_incomplete_weights(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_model(broken)


class TestGGUF:
    """A hand-made GGUF file: the header alone decides."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        import gguf
        import numpy as np

        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("llama.context_length", 128)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
        writer.add_tensor("output.weight", np.zeros((4, 64), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def test_header(self, gguf: Path) -> None:
        header = read_gguf_header(gguf)
        assert header.architecture == "llama"
        assert header.metadata["llama.context_length"] == 128
        assert list(header.tensors) == ["token_embd.weight", "output.weight"]
        assert header.tensors["output.weight"].shape == (4, 64)
        assert header.expected_bytes <= gguf.stat().st_size < header.expected_bytes + 32
        assert locate(gguf).model_type == "llama"

    def test_truncated_anywhere(self, gguf: Path) -> None:
        whole = gguf.read_bytes()
        expected = read_gguf_header(gguf).expected_bytes
        for size in [*range(4, expected, 37), expected - 1]:
            gguf.write_bytes(whole[:size])
            with pytest.raises(ModelLoadError, match=r"truncated|without general"):
                read_gguf_header(gguf)

    def test_foreign_file(self, gguf: Path) -> None:
        gguf.write_bytes(b"PK\x03\x04" + bytes(100))
        with pytest.raises(ModelLoadError, match="first bytes"):
            load_model(gguf)
        gguf.write_bytes(b"")
        with pytest.raises(ModelLoadError, match="got 0 bytes"):
            load_model(gguf)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        import gguf

        path = tmp_path / "other.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelLoadError, match="'mamba' is not supported"):
            load_model(path)


def test_threads_take_turns_with_transformers() -> None:
    """What it replaces while it loads, it puts back: unless another thread came between."""
    entered = threading.Event()

    def other() -> None:
        with quiet_transformers():
            entered.set()

    thread = threading.Thread(target=other)
    with quiet_transformers():
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()
