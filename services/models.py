"""Which model is served: a path that a user gave, or the default one.

What a worker would find wrong with its files is found here first, without torch and in less than a
second: nothing is started for a model that cannot be served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.config import ServeConfig
from services.default_model import DEFAULT_MODEL, resolve
from services.errors import ModelError
from worker.model.errors import ModelLoadError
from worker.model.source import ModelSource, locate

GGUF_MAGIC: Final = b"GGUF"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model on this machine's disk."""

    path: Path
    """Absolute; a Hugging Face directory or a GGUF file."""
    name: str
    """In the API."""
    kv_elements_per_token: int | None = None
    """Numbers that the keys and values of one token are; None where the files leave it to
    defaults.
    """


def find_model(
    config: ServeConfig, cache_directory: Path, progress: Callable[[str], None]
) -> ServedModel:
    """The model of ``config``, the default one fetched when needed. Blocking. Raises ModelError."""
    if config.model is None:
        path = resolve(cache_directory=cache_directory, progress=progress)
        return ServedModel(
            path=path,
            name=config.served_model_name or DEFAULT_MODEL.name,
            kv_elements_per_token=kv_elements_per_token(_check_files(path, str(path))),
        )
    path = Path(config.model).expanduser().absolute()
    _check(path, config.model)
    source = _check_files(path, config.model)
    name = path.stem if path.is_file() else path.name
    return ServedModel(
        path=path,
        name=config.served_model_name or name,
        kv_elements_per_token=kv_elements_per_token(source),
    )


def _check(path: Path, given: str) -> None:
    expected = "expected a Hugging Face directory with a config.json, or a GGUF file"
    if not path.exists():
        raise ModelError(
            f"model {given}: {expected}, got a path that does not exist; "
            "models are not fetched by name, give the path of one on this machine"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; give the file itself: {path / found[0]}" if found else ""
            raise ModelError(f"model {given}: {expected}, got a directory without one{hint}")
        return
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"model {given}: cannot be read: {error}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"model {given}: {expected}, got a file that begins with {magic!r}")


def _check_files(path: Path, given: str) -> ModelSource:
    """Family, configuration, and that the weights are there and whole."""
    try:
        source = locate(path)
    except (ModelLoadError, OSError) as error:
        raise ModelError(f"model {given}: {error}") from error
    return source


def kv_elements_per_token(source: ModelSource) -> int | None:
    """What the files say without the library that knows all defaults."""
    header = source.gguf
    if header is None:
        values: dict[str, Any] = json.loads((source.path / "config.json").read_text("utf-8"))
        names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        whole, parts = values.get("hidden_size"), values.get("num_attention_heads")
    else:
        prefix = f"{header.architecture}."
        values = {key.removeprefix(prefix): value for key, value in header.metadata.items()}
        names = ("block_count", "attention.head_count_kv", "attention.key_length")
        whole, parts = values.get("embedding_length"), values.get("attention.head_count")
    layers, heads, width = (values.get(name) for name in names)
    if width is None and isinstance(whole, int) and isinstance(parts, int) and parts > 0:
        width = whole // parts
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return None
    return 2 * layers * heads * width
