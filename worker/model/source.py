"""Where a model's files are: a Hugging Face directory or one GGUF file, checked before anything is
loaded.

Only safetensors and GGUF weights are read; a pickled checkpoint is refused because reading it may
run code.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.model.errors import ModelLoadError
from worker.model.families import check_gguf_architecture
from worker.model.gguf_header import GGUFHeader, read_gguf_header
from worker.model.pageable import check_pageable

GGUF_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class ModelSource:
    """A model that is there and whole. ``gguf`` is None for a Hugging Face directory."""

    path: Path
    model_type: str
    """As the files declare it: a transformers model type or a GGUF architecture."""
    gguf: GGUFHeader | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every ``from_pretrained`` that read this source and nothing else."""
        common: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        if self.gguf is None:
            return {"pretrained_model_name_or_path": str(self.path), **common}
        return {
            "pretrained_model_name_or_path": str(self.path.parent),
            "gguf_file": self.path.name,
            **common,
        }

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk."""
        if self.gguf is not None:
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in self.shards)

    @property
    def shards(self) -> list[Path]:
        """The safetensors files of a directory. Raises ModelLoadError."""
        return _shards(self.path)


def locate(path: str | Path) -> ModelSource:
    """Find and check the files of a model.

    Raises:
        ModelLoadError: nothing there, not a model, unknown family, files missing or truncated.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return _gguf(place)
    if place.is_dir():
        return _directory(place)
    raise ModelLoadError(
        f"{place}: expected a Hugging Face directory or a GGUF file, found nothing; check the path"
    )


def _gguf(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"{path}: expected a GGUF file or a directory with config.json, got "
            f"{path.suffix or 'a'} file"
        )
    if GGUF_SHARD.search(path.name):
        raise ModelLoadError(
            f"{path}: a GGUF file in several parts is not supported; merge it with "
            "llama-gguf-split --merge"
        )
    header = read_gguf_header(path)
    check_gguf_architecture(header.architecture)
    return ModelSource(path=path, model_type=header.architecture, gguf=header)


def _directory(path: Path) -> ModelSource:
    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; give the path of one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
        raise ModelLoadError(f"{path}: expected config.json in a Hugging Face directory{hint}")
    values = _json_object(config)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"{config}: expected a string model_type, got {model_type!r}")
    check_pageable(values)  # before anybody converts weights in vain
    for shard in _shards(path):
        check_safetensors(shard)
    return ModelSource(path=path, model_type=model_type)


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{index}: expected an object weight_map")
        shards = [path / str(name) for name in sorted(set(weight_map.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelLoadError(f"{path}: weight files are missing: {', '.join(missing)}")
        return shards
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    pickled = sorted(file.name for file in path.glob("*.bin"))
    if pickled:
        raise ModelLoadError(
            f"{path}: expected safetensors, found pickled weights ({pickled[0]}), which may run "
            "code "
            "when read; convert them to safetensors"
        )
    raise ModelLoadError(f"{path}: expected model.safetensors or its index, found neither")


def check_safetensors(path: Path) -> None:
    """Compare the file's size with its own header.

    Raises:
        ModelLoadError: the file is shorter than its tensors, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + header_bytes > size:
            raise ModelLoadError(f"{path}: truncated or foreign safetensors file; fetch it again")
        try:
            header = json.loads(file.read(header_bytes))
            end = max(
                (entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{path}: unreadable safetensors header; fetch it again"
            ) from error
    if 8 + header_bytes + end > size:
        raise ModelLoadError(
            f"{path}: truncated safetensors file, expected {8 + header_bytes + end} bytes, got "
            f"{size}; "
            "fetch it again"
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: unreadable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
