"""``python -m benchmarks.serve``: disaggregated against aggregated serving and transformers' own
``generate``.

All three run at once and take turns (idle ones use no processor time): a round measures every mode
at every concurrency, so that a slow minute of the machine hits each of them; figures are medians
over rounds. Every side computes in float32
with the same number of torch threads, the same real prompts, greedily, and exactly
``--output-tokens`` tokens a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import closed_loop, interpreter_waits, prompts, report
from benchmarks.service_process import Service, free_port
from services.default_model import resolve


class Peer:
    """transformers' generate in its own process."""

    def __init__(self, model: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.peer_transformers",
                str(model),
                "--threads",
                str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, texts: Sequence[str], output_tokens: int) -> closed_loop.LoadResult:
        assert self._process.stdin is not None
        result = closed_loop.LoadResult()
        started = time.perf_counter()
        for text in texts:
            self._process.stdin.write(
                json.dumps({"prompt": text, "output_tokens": output_tokens}) + "\n"
            )
            self._process.stdin.flush()
            times = self._answer()["ms"]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            result.samples.append(closed_loop.Sample(times[0], gaps, len(times), times[-1] / 1e3))
        result.wall_s = time.perf_counter() - started
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def summary(rounds: Sequence[closed_loop.LoadResult]) -> dict[str, Any]:
    """Quantiles over all samples; throughput is the median over rounds."""
    return {
        "ttft_ms": report.quantiles([s.ttft_ms for r in rounds for s in r.samples]),
        "itl_ms": report.quantiles([g for r in rounds for s in r.samples for g in s.itl_ms]),
        "output_tokens_per_s": round(statistics.median(r.output_tokens_per_s for r in rounds), 2),
        "requests": sum(len(r.samples) for r in rounds),
        "rounds_output_tokens_per_s": [round(r.output_tokens_per_s, 2) for r in rounds],
    }


def slices(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Endless slices of ``texts``: every mode gets the same prompts in a round, no round repeats
    the last one's.
    """
    position = 0
    while True:
        yield [texts[(position + i) % len(texts)] for i in range(size)]
        position += size


def measure(
    arguments: argparse.Namespace, services: dict[str, Service], peer: Peer
) -> dict[str, Any]:
    texts = [
        turns[0] for turns in prompts.mt_bench(Path.home() / ".cache" / "pageferry" / "benchmarks")
    ]
    # One unmeasured load each: caches, lazily bound libraries and first connections.
    warm_up = max(arguments.concurrency)
    for service in services.values():
        asyncio.run(closed_loop.run(service.url, service.model, texts[:warm_up], warm_up, 8))
    peer.run(texts[:1], 8)
    sources = {
        concurrency: slices(texts, arguments.requests * concurrency)
        for concurrency in arguments.concurrency
    }
    runs: dict[tuple[str, int], list[closed_loop.LoadResult]] = {}
    for number in range(arguments.rounds):
        for concurrency, source in sources.items():
            batch = next(source)
            for name, service in services.items():
                load = closed_loop.run(
                    service.url, service.model, batch, concurrency, arguments.output_tokens
                )
                runs.setdefault((name, concurrency), []).append(asyncio.run(load))
            if concurrency == 1:
                result = peer.run(batch, arguments.output_tokens)
                runs.setdefault(("transformers", 1), []).append(result)
        print(f"round {number + 1} of {arguments.rounds} done", flush=True)
    modes: dict[str, Any] = {}
    for (name, concurrency), rounds in runs.items():
        modes.setdefault(name, {"concurrency": {}})["concurrency"][str(concurrency)] = summary(
            rounds
        )
    return modes


def table(modes: dict[str, Any]) -> None:
    print(
        f"{'mode':<15}{'conc.':>6}{'TTFT p50':>10}{'p90':>8}{'p99':>8}"
        f"{'ITL p50':>9}{'p90':>8}{'p99':>8}{'tok/s':>9}"
    )
    for name, mode in modes.items():
        for concurrency, row in mode["concurrency"].items():
            t, i = row["ttft_ms"], row["itl_ms"]
            print(
                f"{name:<15}{concurrency:>6}{t['p50']:>10.1f}{t['p90']:>8.1f}{t['p99']:>8.1f}"
                f"{i['p50']:>9.1f}{i['p90']:>8.1f}{i['p99']:>8.1f}{row['output_tokens_per_s']:>9.1f}"
            )


def ratios(modes: dict[str, Any]) -> dict[str, float]:
    """The ratios that the project holds itself to."""
    rate = {
        (n, c): row["output_tokens_per_s"]
        for n, m in modes.items()
        for c, row in m["concurrency"].items()
    }
    ttft = {
        n: m["concurrency"]["1"]["ttft_ms"]["p50"]
        for n, m in modes.items()
        if "1" in m["concurrency"]
    }
    found: dict[str, float] = {}
    if ("transformers", "1") in rate:
        base = rate["transformers", "1"]
        for name, concurrency in rate:
            if name != "transformers":
                found[f"{name}_at_{concurrency}_over_transformers"] = round(
                    rate[name, concurrency] / base, 3
                )
        found["disaggregated_ttft_minus_aggregated_ms"] = round(
            ttft["disaggregated"] - ttft["aggregated"], 2
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="Hugging Face directory or GGUF file; the default model when left out"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--requests", type=int, default=4, help="requests a client sends in each round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of every process that computes"
    )
    parser.add_argument("--out")
    arguments = parser.parse_args()
    model = Path(arguments.model) if arguments.model else resolve()
    common = ["--torch-threads", str(arguments.threads), "--dtype", "float32"]
    with contextlib.ExitStack() as stack:
        print(
            "starting the aggregated service, the disaggregated service and transformers",
            flush=True,
        )
        services = {
            "disaggregated": stack.enter_context(
                Service(model, free_port(), ["--context", "1", "--generation", "1", *common])
            ),
            "aggregated": stack.enter_context(
                Service(model, free_port(), ["--aggregated", *common])
            ),
        }
        peer = Peer(model, arguments.threads)
        stack.callback(peer.close)
        modes = measure(arguments, services, peer)
        waits = {name: interpreter_waits.read(service.url) for name, service in services.items()}
    table(modes)
    report.finish(
        {
            "modes": modes,
            "ratios": ratios(modes),
            "interpreter_waits": waits,
            "threads": arguments.threads,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
