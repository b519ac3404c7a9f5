"""What ``benchmarks.serve`` makes of its loads: quantiles, medians, ratios of sides."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import report
from benchmarks.closed_loop import LoadResult

TRANSFORMERS: Final = "transformers"
OURS: Final = ("disaggregated", "aggregated")
Modes = dict[str, Any]
"""By name of a side: ``{"concurrency": {number as text: summary}}``."""


def summary(rounds: Sequence[LoadResult]) -> dict[str, Any]:
    """Quantiles over all samples; throughput is the median over rounds."""
    samples = [sample for one in rounds for sample in one.samples]
    return {
        "ttft_ms": report.quantiles([s.ttft_ms for s in samples]),
        "itl_ms": report.quantiles([gap for s in samples for gap in s.itl_ms]),
        "output_tokens_per_s": round(statistics.median(r.output_tokens_per_s for r in rounds), 2),
        "requests": len(samples),
        "prompt_tokens": sum(s.prompt_tokens for s in samples),
        "rounds_output_tokens_per_s": [round(r.output_tokens_per_s, 2) for r in rounds],
    }


def modes_of(runs: Mapping[tuple[str, int], Sequence[LoadResult]]) -> Modes:
    """All summaries."""
    modes: Modes = {}
    for (name, concurrency), rounds in runs.items():
        by_concurrency = modes.setdefault(name, {"concurrency": {}})["concurrency"]
        by_concurrency[str(concurrency)] = summary(rounds)
    return modes


def table(modes: Modes) -> str:
    """A line a side and concurrency."""
    lines = [
        f"{'mode':<15}{'conc.':>6}{'TTFT p50':>10}{'p90':>8}{'p99':>8}"
        f"{'ITL p50':>9}{'p90':>8}{'p99':>8}{'tok/s':>9}"
    ]
    for name, mode in modes.items():
        for concurrency, row in mode["concurrency"].items():
            t, i = row["ttft_ms"], row["itl_ms"]
            lines.append(
                f"{name:<15}{concurrency:>6}{t['p50']:>10.1f}{t['p90']:>8.1f}{t['p99']:>8.1f}"
                f"{i['p50']:>9.1f}{i['p90']:>8.1f}{i['p99']:>8.1f}{row['output_tokens_per_s']:>9.1f}"
            )
    return "\n".join(lines)


def ratios(modes: Modes) -> dict[str, float]:
    """The ratios that the project holds itself to: every side over one caller of transformers, and
    what two instances cost the first token.
    """
    rows = {
        (name, number): row
        for name, mode in modes.items()
        for number, row in mode["concurrency"].items()
    }
    found: dict[str, float] = {}
    if (TRANSFORMERS, "1") in rows:
        base = rows[TRANSFORMERS, "1"]["output_tokens_per_s"]
        for (name, number), row in rows.items():
            if name != TRANSFORMERS:
                ratio = row["output_tokens_per_s"] / base
                found[f"{name}_at_{number}_over_{TRANSFORMERS}"] = round(ratio, 3)
    alone = [rows[name, "1"] for name in OURS if (name, "1") in rows]
    if len(alone) == len(OURS):
        apart, together = (row["ttft_ms"]["p50"] for row in alone)
        found["disaggregated_ttft_minus_aggregated_ms"] = round(apart - together, 2)
    return found


def beside(modes: Modes, peers: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each peer and each of our modes at each concurrency, ours over the peer's: throughput
    (more is better), medians of the time to the first token and between tokens (less is).
    """
    found: dict[str, dict[str, float]] = {}
    for peer in peers:
        for name in OURS:
            for number, ours in modes.get(name, {"concurrency": {}})["concurrency"].items():
                theirs = modes[peer]["concurrency"][number]
                found[f"{name}_at_{number}_over_{peer}"] = {
                    "output_tokens_per_s": _over(
                        ours["output_tokens_per_s"], theirs["output_tokens_per_s"]
                    ),
                    "ttft_ms": _over(ours["ttft_ms"]["p50"], theirs["ttft_ms"]["p50"]),
                    "itl_ms": _over(ours["itl_ms"]["p50"], theirs["itl_ms"]["p50"]),
                }
    return found


def unequal_prompts(modes: Modes) -> list[str]:
    """Sides whose count of prompt tokens is not the first side's: another template or tokenizer,
    so that not the same work was measured.
    """
    found = []
    for number in {n: None for mode in modes.values() for n in mode["concurrency"]}:
        counts = {
            name: mode["concurrency"][number]["prompt_tokens"]
            for name, mode in modes.items()
            if number in mode["concurrency"]
        }
        first, *others = counts
        found += [
            f"at {number}: {counts[name]} prompt tokens at {name}, {counts[first]} at {first}"
            for name in others
            if counts[name] != counts[first]
        ]
    return found


def _over(ours: float, theirs: float) -> float:
    return round(ours / theirs, 3) if theirs else float("nan")
