"""One line about what the cache did, for the log of the admission path, at most once a minute.

Pure: the caller has the clock and the logger. It tells what requests could have reused and why they
did not, which no single gauge does.
"""

from __future__ import annotations

from dataclasses import fields, replace

from kvcache_core.counters import CacheCounters

INTERVAL_MS = 60_000


class CountersReport:
    """Lines about the counters of one manager, each about what happened since the line before."""

    def __init__(self, interval_ms: int = INTERVAL_MS) -> None:
        self._interval_ms = interval_ms
        self._told = CacheCounters()
        self._told_at_ms: int | None = None

    def line(self, counters: CacheCounters, now_ms: int) -> str | None:
        """The line that is due; None within a minute of the last one, or if nothing happened."""
        if self._told_at_ms is not None and now_ms < self._told_at_ms + self._interval_ms:
            return None
        if counters == self._told:
            return None
        line = describe(self._told, counters)
        self._told = replace(counters, branches=counters.branches.copy())
        self._told_at_ms = now_ms
        return line


def describe(before: CacheCounters, after: CacheCounters) -> str:
    """What changed between two states of the counters, ``name=increase``, in their order."""
    changes: list[str] = []
    for field in fields(CacheCounters):
        if field.name == "branches":
            changes += [
                f"branch_{choice.value}={count - before.branches[choice]}"
                for choice, count in after.branches.items()
                if count != before.branches[choice]
            ]
            continue
        increase = getattr(after, field.name) - getattr(before, field.name)
        if increase:
            changes.append(f"{field.name}={increase}")
    return "kv cache: " + " ".join(changes)
