"""Figures of the cases from their rounds, and what they say: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from benchmarks.transfer.cases import GOAL_TOKENS, Case

MOST_BOUND_RATIO: Final = 1.15
LEAST_EFFICIENCY: Final = 0.9
LEAST_RAW_GB_S: Final = 2.0
MOST_LAST_CHUNK: Final = 0.25


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a case, in seconds; ``passes`` over the bytes beside the messages."""

    copy_gb_s: float
    raw_s: float
    pages_s: float
    passes: float
    raw_cpu_s: float
    pages_cpu_s: float
    """Processor time of all ranks, which neighbours on the machine disturb less than time."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case and its rounds."""

    case: Case
    size_bytes: int
    """Of all streams together."""
    apart: int
    """Streams with slots of their own."""
    rounds: tuple[Round, ...]
    prefill_speed: float | None = None
    """Of the prefill beside pages, over that of the prefill alone."""

    @property
    def gb_s(self) -> float:
        """Pages."""
        return self.size_bytes / median(entry.pages_s for entry in self.rounds) / 1e9

    @property
    def raw_gb_s(self) -> float:
        """Raw messages."""
        return self.size_bytes / median(entry.raw_s for entry in self.rounds) / 1e9

    @property
    def efficiency(self) -> float:
        """Raw time over pages' time, round by round."""
        return median(entry.raw_s / entry.pages_s for entry in self.rounds)

    @property
    def passes(self) -> float:
        """Times that every byte was copied beside the message."""
        return median(entry.passes for entry in self.rounds)

    @property
    def cpu_over_raw(self) -> float:
        """Processor time of pages over that of the raw messages, round by round."""
        return median(entry.pages_cpu_s / entry.raw_cpu_s for entry in self.rounds)

    @property
    def bound_ratio(self) -> float:
        """Time over what messages and passes must take one after the other, round by round."""
        return median(self._over_bound(entry) for entry in self.rounds)

    @property
    def best_bound_ratio(self) -> float:
        """That of the best round: what neighbours on the machine did not disturb."""
        return min(self._over_bound(entry) for entry in self.rounds)

    def _over_bound(self, entry: Round) -> float:
        copying_s = entry.passes * self.size_bytes / (entry.copy_gb_s * 1e9)
        return entry.pages_s / (entry.raw_s + copying_s)

    def fields(self) -> dict[str, Any]:
        """For the JSON line."""
        found: dict[str, Any] = {
            "tokens": self.case.tokens,
            "tp": str(self.case.shape),
            "streams": self.case.streams,
            "gb_s": round(self.gb_s, 3),
            "raw_gb_s": round(self.raw_gb_s, 3),
            "efficiency": round(self.efficiency, 3),
            "passes": round(self.passes, 3),
            "bound_ratio": round(self.bound_ratio, 3),
            "best_bound_ratio": round(self.best_bound_ratio, 3),
            "copy_gb_s": round(median(entry.copy_gb_s for entry in self.rounds), 2),
            "way": self.case.way,
            "prefill": self.case.prefill,
            "bytes": self.size_bytes,
            "rounds": len(self.rounds),
            "apart": self.apart,
        }
        if self.prefill_speed is None:
            found["cpu_over_raw"] = round(self.cpu_over_raw, 3)
        else:
            found["prefill_speed"] = round(self.prefill_speed, 3)
        return found


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A prompt shipped chunk by chunk while a prefill computes; times of each round in seconds."""

    tokens: int
    tp: str
    chunk_tokens: int
    whole_s: tuple[float, ...]
    """All chunks shipped at once, nothing computing."""
    tail_s: tuple[float, ...]
    """From the last chunk done to all pages usable."""

    @property
    def share(self) -> float:
        """Of the whole transfer's time that a request waits for behind its prefill."""
        return median(tail / whole for tail, whole in zip(self.tail_s, self.whole_s, strict=True))

    def fields(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "tokens": self.tokens,
            "tp": self.tp,
            "chunk_tokens": self.chunk_tokens,
            "whole_ms": round(median(self.whole_s) * 1e3, 3),
            "tail_ms": round(median(self.tail_s) * 1e3, 3),
            "share": round(self.share, 3),
            "last_chunk_of_bytes": round(self.chunk_tokens / self.tokens, 4),
        }


def void_reasons(device: str, results: Sequence[CaseResult]) -> Iterator[str]:
    """Why figures on a CPU say nothing: the raw message itself was too slow."""
    if device != "cpu":
        return
    for result in results:
        quiet = not result.case.prefill and result.case.tokens >= GOAL_TOKENS
        if quiet and result.raw_gb_s < LEAST_RAW_GB_S:
            yield (
                f"{result.case}: expected a raw message of at least {LEAST_RAW_GB_S} GB/s, got "
                f"{result.raw_gb_s:.2f}; something else uses the processors, run it again"
            )


def missed_goals(
    results: Sequence[CaseResult], pipelines: Sequence[PipelineResult]
) -> Iterator[str]:
    """Goals of quiet cases and of pipelining that were not reached."""
    for result in results:
        if result.case.prefill or result.case.tokens < GOAL_TOKENS:
            continue
        if result.bound_ratio > MOST_BOUND_RATIO:
            yield f"{result.case}: bound ratio {result.bound_ratio:.2f} > {MOST_BOUND_RATIO}"
        direct = result.case.shape.equal and result.case.way == "default"
        if direct and result.efficiency < LEAST_EFFICIENCY:
            yield f"{result.case}: efficiency {result.efficiency:.2f} < {LEAST_EFFICIENCY}"
    for pipeline in pipelines:
        # A chunk of a quarter of the prompt or more cannot take less than that of its time.
        smaller = pipeline.chunk_tokens < MOST_LAST_CHUNK * pipeline.tokens
        if smaller and pipeline.share >= MOST_LAST_CHUNK:
            yield (
                f"chunks of {pipeline.chunk_tokens} tokens, tp {pipeline.tp}: the last takes "
                f"{pipeline.share:.2f} of the whole >= {MOST_LAST_CHUNK}"
            )


def case_line(result: CaseResult) -> str:
    """A row of the table."""
    case = result.case
    way = f"{case.way}{'+prefill' if case.prefill else ''}"
    return (
        f"{case.tokens:>7} {case.shape!s:>5} {case.streams:>7} {way:<18} {result.raw_gb_s:>7.2f} "
        f"{result.gb_s:>7.2f} {result.efficiency:>6.2f} {result.passes:>6.1f} "
        f"{result.bound_ratio:>6.2f} {result.best_bound_ratio:>6.2f} {result.cpu_over_raw:>6.2f}"
    )


CASE_HEADER: Final = (
    f"{'tokens':>7} {'tp':>5} {'streams':>7} {'way':<18} {'raw':>7} {'pages':>7} {'eff.':>6} "
    f"{'passes':>6} {'bound':>6} {'best':>6} {'cpu':>6}"
)


def pipeline_line(result: PipelineResult) -> str:
    """A line about pipelining."""
    return (
        f"{result.tokens} tokens at tp {result.tp} in chunks of {result.chunk_tokens}: usable "
        f"{median(result.tail_s) * 1e3:.1f} ms after the last, {result.share:.3f} of the whole "
        f"{median(result.whole_s) * 1e3:.1f} ms"
    )
