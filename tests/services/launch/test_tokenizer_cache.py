"""The cache of exported tokenizers: when it exports, when it does not, and that it holds no
halves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.errors import ModelError
from services.tokenizer_cache import exported_tokenizer, identity

COUNT = (
    "-c",
    "import sys, pathlib; folder = pathlib.Path(sys.argv[2]);"
    "(folder / 'tokenizer.json').write_text(sys.argv[1]);"
    "log = pathlib.Path(sys.argv[1]).parent / 'exports'; log.open('a').write('x')",
)
FAIL = (
    "-c",
    "import sys, pathlib; (pathlib.Path(sys.argv[2]) / 'tokenizer.json').write_text('half');"
    "sys.exit('no tokenizer in this model')",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    return file


def exports(model: Path) -> int:
    log = model.parent / "exports"
    return len(log.read_text()) if log.exists() else 0


async def test_exported_once_for_an_unchanged_model(model: Path, tmp_path: Path) -> None:
    first = await exported_tokenizer(model, tmp_path / "cache", exporter=COUNT)
    second = await exported_tokenizer(model, tmp_path / "cache", exporter=COUNT)
    assert first == second
    assert (first / "tokenizer.json").read_text() == str(model)
    assert exports(model) == 1


async def test_exported_again_when_the_file_changed(model: Path, tmp_path: Path) -> None:
    first = await exported_tokenizer(model, tmp_path / "cache", exporter=COUNT)
    model.write_bytes(b"GGUF and more")  # noqa: ASYNC240  a few bytes in a test
    second = await exported_tokenizer(model, tmp_path / "cache", exporter=COUNT)
    assert first != second
    assert exports(model) == 2


async def test_two_at_once_agree(model: Path, tmp_path: Path) -> None:
    folders = await asyncio.gather(
        *(exported_tokenizer(model, tmp_path / "cache", exporter=COUNT) for _ in range(3))
    )
    assert len(set(folders)) == 1
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


async def test_a_failed_export_says_why_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be exported: no tokenizer in this model"):
        await exported_tokenizer(model, tmp_path / "cache", exporter=FAIL)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_weights_of_a_directory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert identity(tmp_path) == before
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert identity(tmp_path) != before


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        identity(tmp_path / "absent")
