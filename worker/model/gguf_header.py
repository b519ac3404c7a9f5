"""Header of a GGUF file, read without loading tensors: architecture, scalar metadata, expected file
size.

transformers reports a truncated or foreign GGUF file as a numpy or struct error minutes into the
load; this reader finds both in milliseconds. Layout: magic, version, counts, key-value pairs,
tensor infos, aligned tensor data (GGUF v2 and v3).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from worker.model.errors import ModelLoadError

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32

# GGUF value types; 8 is a string, 9 an array.
SCALARS: Final[dict[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING: Final = 8
ARRAY: Final = 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is in torch's order: rows first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    """From the start of the data section."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """``metadata`` holds strings and scalars; arrays (the vocabulary) are skipped."""

    architecture: str
    metadata: dict[str, str | int | float | bool]
    tensors: dict[str, GGUFTensor]
    data_start: int

    @property
    def expected_bytes(self) -> int:
        """Size of the file up to the end of the last tensor."""
        ends = (tensor.offset + tensor.num_bytes for tensor in self.tensors.values())
        return self.data_start + max(ends, default=0)


class _Cursor:
    """Position in the mapped file; every read past the end is a truncated file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def scalar(self, code: str) -> int | float | bool:
        try:
            (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        except struct.error as error:
            raise self.truncated() from error
        self.offset += struct.calcsize("<" + code)
        return value

    def count(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def text(self) -> str:
        length = self.count()
        self.skip(length)
        return self._data[self.offset - length : self.offset].decode("utf-8", "replace")

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.offset:
            raise self.truncated()
        self.offset += num_bytes

    def skip_array(self) -> None:
        element, length = self.count("I"), self.count()
        if element in SCALARS:
            self.skip(length * struct.calcsize("<" + SCALARS[element]))
        elif element == STRING:
            for _ in range(length):
                self.skip(self.count())
        else:
            raise ModelLoadError(f"{self._path}: unknown GGUF array type {element}")

    def value(self) -> str | int | float | bool | None:
        kind = self.count("I")
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            self.skip_array()
            return None
        raise ModelLoadError(f"{self._path}: unknown GGUF value type {kind}")

    def truncated(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path}: truncated GGUF file ({len(self._data)} bytes end inside the header); "
            "fetch it again"
        )


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header.

    Raises:
        ModelLoadError: not a GGUF file, an unknown version or type, or a file shorter than its
            tensors.
    """
    size = path.stat().st_size
    if size < len(MAGIC):
        raise ModelLoadError(f"{path}: expected a GGUF file, got {size} bytes; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _parse(_Cursor(data, path), path)
    if size < header.expected_bytes:
        raise ModelLoadError(
            f"{path}: truncated GGUF file, expected {header.expected_bytes} bytes, got {size}; "
            "fetch it again"
        )
    return header


def _parse(cursor: _Cursor, path: Path) -> GGUFHeader:
    cursor.skip(len(MAGIC))
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise ModelLoadError(f"{path}: expected a GGUF file, its first bytes are {magic!r}")
    version = cursor.count("I")
    if version not in (2, 3):
        raise ModelLoadError(f"{path}: expected GGUF version 2 or 3, got {version}")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata: dict[str, str | int | float | bool] = {}
    for _ in range(num_values):
        key = cursor.text()
        value = cursor.value()
        if value is not None:
            metadata[key] = value
    tensors = dict(_tensor_info(cursor, path) for _ in range(num_tensors))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    data_start = -(-cursor.offset // alignment) * alignment
    if "general.architecture" not in metadata:
        raise ModelLoadError(f"{path}: GGUF file without general.architecture; convert it again")
    return GGUFHeader(
        architecture=str(metadata["general.architecture"]),
        metadata=metadata,
        tensors=tensors,
        data_start=data_start,
    )


def _tensor_info(cursor: _Cursor, path: Path) -> tuple[str, GGUFTensor]:
    name = cursor.text()
    dimensions = [cursor.count() for _ in range(cursor.count("I"))]
    number, offset = cursor.count("I"), cursor.count()
    try:
        kind = GGMLQuantizationType(number)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{path}: tensor {name} has quantisation type {number}, which the installed gguf "
            "package "
            "does not know; upgrade gguf or use another quantisation"
        ) from error
    num_bytes = math.prod(dimensions) // block_elements * block_bytes
    return name, GGUFTensor(tuple(reversed(dimensions)), kind, offset, num_bytes)
