"""Facts on which two ranks disagree: one row a fact, with both values and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from transfer.rank_info import RankInfo

ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One fact on which two ranks disagree."""

    field: str
    local: str
    remote: str
    advice: str

    @override
    def __str__(self) -> str:
        return f"{self.field}: ours is {self.local}, the peer's is {self.remote}; {self.advice}"


class PeerIncompatible(ConnectionError):
    """The pair cannot exchange pages. ``rows`` are all reasons."""

    def __init__(self, peer: str, rows: tuple[Incompatibility, ...]) -> None:
        self.rows = rows
        reasons = "\n  ".join(str(row) for row in rows)
        super().__init__(f"cannot exchange pages with {peer}:\n  {reasons}")


Facts = Mapping[str, tuple[Callable[[RankInfo], object], str]]
"""By name: how to read a fact of a rank, and what to do where two ranks differ in it."""


def fact_rows(facts: Facts, local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    """A row for each of ``facts`` that is not equal."""
    for name, (read, advice) in facts.items():
        ours, theirs = read(local), read(remote)
        if ours != theirs:
            yield Incompatibility(name, value_text(ours), value_text(theirs), advice)


def value_text(value: object) -> str:
    """A value as a row shows it."""
    match value:
        case None:
            return ABSENT
        case tuple():
            return "[" + ", ".join(str(entry) for entry in value) + "]"
        case _:
            return str(value)
