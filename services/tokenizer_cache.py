"""The exported tokenizer of a model: made once by a short-lived process, kept in the user's cache.

The key covers every file that can change the result (name, size, time of change; weights only for a
GGUF, which holds everything) and the versions of what makes it. A folder appears in the cache whole
or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.environment import child_environment
from services.errors import ModelError

FORMAT: Final = "1"
"""Raise it when the exporter writes something else for the same model."""
EXPORT_TIMEOUT_S: Final = 300.0
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


EXPORTER: Final = ("-P", "-m", "worker.model.export_tokenizer")
"""Arguments of Python, followed by the model and the folder to write to."""


async def exported_tokenizer(
    model: Path, cache_directory: Path, *, exporter: Sequence[str] = EXPORTER
) -> Path:
    """Folder with ``tokenizer.json`` and what belongs to it. Raises ModelError."""
    target = cache_directory / "tokenizers" / identity(model)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(prefix=".export-", dir=target.parent)
    except OSError as error:
        raise ModelError(
            f"the tokenizer of {model} cannot be kept in {target.parent}: {error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        await _export(model, Path(work), exporter)
        try:
            os.rename(work, target)
        except OSError:
            # Somebody else has put the same content there meanwhile.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def identity(model: Path) -> str:
    """A name for what the export of ``model`` would contain. Raises ModelError."""
    digest = hashlib.sha256()
    try:
        files = [model] if model.is_file() else sorted(model.iterdir())
        for file in files:
            if file != model and (file.suffix in WEIGHTS or not file.is_file()):
                continue
            facts = file.stat()
            digest.update(f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ModelError(f"model {model}: cannot be read: {error}") from error
    for package in ("transformers", "tokenizers"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(FORMAT.encode())
    return digest.hexdigest()[:32]


async def _export(model: Path, target: Path, exporter: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *exporter, str(model), str(target)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment({}),
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), EXPORT_TIMEOUT_S)
    except TimeoutError as error:
        raise ModelError(
            f"exporting the tokenizer of {model} took longer than {EXPORT_TIMEOUT_S:.0f} s"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
        raise ModelError(
            f"the tokenizer of {model} cannot be exported: "
            f"{lines[-1] if lines else f'exit code {process.returncode}'}"
        )
