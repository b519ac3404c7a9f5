"""The weights of one rank in safetensors files, without the parts of other ranks.

Nothing is read before somebody asks for a tensor, so other ranks' parts take no memory. What lies
in one piece stays where it is, a view of the mapped file; of what does not the part alone is
copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

import torch
from safetensors import safe_open

from worker.model.errors import ModelLoadError
from worker.model.kv_scales import is_scale
from worker.model.quantisation import SERVED
from worker.model.shard import ShardPlan
from worker.progress import BytesRead, Progress

STORED_TYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What weights are read from. 8-bit floats and less come with scales that nobody here applies."""
MEMORY_PAGE_BYTES: Final = 4096


@dataclass(frozen=True)
class _Place:
    """Where a part is in its tensor of ``shape``; an empty index is the whole. Values that the rank
    does not own are zeros.
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    dtype: torch.dtype
    owned: bool

    @property
    def num_bytes(self) -> int:
        """Of the part alone."""
        axes = zip(self.index, self.shape, strict=False)  # the last ones are whole
        cut = [len(range(*own.indices(size))) for own, size in axes]
        return math.prod((*cut, *self.shape[len(cut) :])) * self.dtype.itemsize


class RankPart:
    """A rank's part of one tensor, read when it is indexed with an ellipsis, as transformers does
    with a slice of a file.
    """

    def __init__(self, whole: Any, place: _Place, read: BytesRead) -> None:
        self._whole = whole
        self._place = place
        self._read = read

    @property
    def dtype(self) -> torch.dtype:
        """The file's."""
        return self._place.dtype

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        """The part, contiguous, on CPU in the file's type. Any thread."""
        values: torch.Tensor = self._whole[self._place.index or everything].contiguous()
        # A mapped file is read when its memory is touched: now, so that the count is true.
        values.reshape(-1).view(torch.uint8)[::MEMORY_PAGE_BYTES].sum()
        self._read.add(values.nbytes)
        return values if self._place.owned else torch.zeros_like(values)


@contextmanager
def rank_weights(
    files: Sequence[Path], plan: ShardPlan, progress: Progress
) -> Iterator[dict[str, RankPart]]:
    """This rank's part of every weight, by name, to be read inside the context.

    Raises:
        ModelLoadError: tensors of types that are not read; all are named.
    """
    with ExitStack() as opened:
        found: list[tuple[str, Any]] = []
        for path in files:
            file = opened.enter_context(safe_open(path, framework="pt"))
            names = [name for name in file.keys() if not is_scale(name)]  # noqa: SIM118  # no mapping
            found += [(name, file.get_slice(name)) for name in names]
        _check_types(found)
        places = {name: _place(name, whole, plan) for name, whole in found}
        total_bytes = sum(place.num_bytes for place in places.values())
        read = BytesRead("reading weights,", total_bytes, progress)
        yield {name: RankPart(whole, places[name], read) for name, whole in found}


def stored_type(file: Path) -> torch.dtype | None:
    """The type of a file's first floating point weight; None without one. Raises ModelLoadError."""
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if not is_scale(name)]  # noqa: SIM118  # no mapping
        slices = [(name, opened.get_slice(name)) for name in names]
        _check_types(slices)
        types = (STORED_TYPES[whole.get_dtype()] for _, whole in slices)
        return next((dtype for dtype in types if dtype.is_floating_point), None)


def _place(name: str, whole: Any, plan: ShardPlan) -> _Place:
    shape = tuple(whole.get_shape())
    dtype = STORED_TYPES[whole.get_dtype()]
    return _Place(shape, plan.part(name, shape), dtype, plan.owns(name))


def _check_types(found: Sequence[tuple[str, Any]]) -> None:
    foreign = sorted(
        f"{name} ({whole.get_dtype()})"
        for name, whole in found
        if whole.get_dtype() not in STORED_TYPES
    )
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ModelLoadError(
            "expected weights in float32, bfloat16 or float16, got "
            f"{', '.join(foreign[:3])}{more}: quantised safetensors are not read; {SERVED}"
        )
