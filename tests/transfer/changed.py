"""Copies of a rank's facts with one value changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transfer.rank_info import RankInfo

Json = Any
Path = tuple[str | int, ...]


def with_value(info: RankInfo, path: Path, value: object) -> RankInfo:
    """A copy of ``info`` with one value inside it replaced."""

    def put(node: Json, rest: Path) -> Json:
        if not rest:
            return value
        if isinstance(node, dict):
            return {**node, rest[0]: put(node.get(rest[0]), rest[1:])}
        return tuple(
            put(entry, rest[1:]) if index == rest[0] else entry for index, entry in enumerate(node)
        )

    return RankInfo.model_validate(put(info.model_dump(), path))


def leaves(node: Json, path: Path = ()) -> Iterator[Path]:
    """Paths of all numbers and strings in ``node``."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, tuple) and node:
        for index, value in enumerate(node):
            yield from leaves(value, (*path, index))
    elif isinstance(node, int | str):
        yield path
