"""What is wrong with a model is said before anything is started."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from services.config import ServeConfig
from services.errors import ModelError
from services.models import find_model


def directory(parent: Path, config: str, *, weights: bool = True) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    if weights:
        header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(4)
        (folder / "model.safetensors").write_bytes(content)
    return folder


def gguf_file(parent: Path, architecture: str = "llama") -> Path:
    path = parent / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def find(path: Path) -> Any:
    config = ServeConfig.model_validate({"model": str(path)})
    return find_model(config, path, lambda _: None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("", "config.json: unreadable JSON"),
        ("{", "config.json: unreadable JSON"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "expected a string model_type, got None"),
        ('{"model_type": "gpt2"}', "'gpt2' is not supported: its positions are not rotary"),
        ('{"model_type": "x", "is_encoder_decoder": true}', "it is an encoder with a decoder"),
        ('{"model_type": "x", "layer_types": ["conv"]}', "layer 0 has type 'conv'"),
    ],
)
def test_a_configuration_that_cannot_be_served(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(ModelError, match=r"^model ") as caught:
        find(directory(tmp_path, config))
    assert said in str(caught.value)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected model\.safetensors"):
        find(directory(tmp_path, '{"model_type": "llama"}', weights=False))


def test_the_family_is_refused_before_its_weights_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        find(directory(tmp_path, '{"model_type": "gpt2"}', weights=False))


def test_safetensors_that_are_cut_short(tmp_path: Path) -> None:
    folder = directory(tmp_path, '{"model_type": "llama"}')
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated safetensors"):
        find(folder)


def test_a_gguf_file_whose_last_tensor_ends_beyond_it(tmp_path: Path) -> None:
    path = gguf_file(tmp_path)
    assert find(path).name == "model"
    path.write_bytes(path.read_bytes()[: -64 * 4])
    with pytest.raises(ModelError, match=r"truncated GGUF file, expected \d+ bytes, got \d+"):
        find(path)
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ModelError, match="truncated GGUF file"):
        find(path)


def test_a_gguf_file_of_another_family(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'falcon' is not supported; expected one of gemma3, ll"):
        find(gguf_file(tmp_path, "falcon"))


def test_what_can_be_served_is_found(tmp_path: Path) -> None:
    folder = directory(tmp_path, '{"model_type": "qwen3"}')
    assert find(folder).path == folder


def test_the_size_of_a_token_is_read_from_the_files(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "hidden_size": 48}
    config = {"model_type": "llama", "num_attention_heads": 6, **sizes}
    folder = directory(tmp_path, json.dumps(config))
    assert find(folder).kv_elements_per_token == 2 * 3 * 2 * 8
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    assert find(folder).kv_elements_per_token == 2 * 3 * 2 * 16
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert find(folder).kv_elements_per_token is None


def test_checking_a_model_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from services.config import ServeConfig;"
        "from services.models import find_model;"
        f"find_model(ServeConfig(model={str(gguf_file(tmp_path))!r}), pathlib.Path(), print);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
