"""Measures every case and prints the table, or is the process of one rank."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Final

import torch

from benchmarks import options
from benchmarks.report import finish
from benchmarks.transfer import __doc__ as description
from benchmarks.transfer.cases import GOAL_TOKENS, Case, Model, Shape, cases, rounds_of
from benchmarks.transfer.instances import Instances, Places, instances
from benchmarks.transfer.pages import RankSpec
from benchmarks.transfer.rank_process import run
from benchmarks.transfer.report import (
    CASE_HEADER,
    CaseResult,
    PipelineResult,
    case_line,
    missed_goals,
    most_last_chunk,
    pipeline_line,
    void_reasons,
)

FAST_LANES: Final = {"cpu": "shm", "cuda": "cuda_ipc"}
COMPUTE_OVER_TRANSFER: Final = 2.0
"""How much longer a chunk computes than it would travel: else the wire is the bottleneck."""
PIPELINE_ROUNDS: Final = 3


class Measurement:
    """Results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = Model(args.layers, args.kv_heads, args.head_dim, args.tokens_per_block)
        self.results: list[CaseResult] = []
        self.pipelines: list[PipelineResult] = []
        self.lanes: set[str] = set()

    async def measure(self, shape: Shape) -> None:
        """All cases of one pair of instances."""
        pool_blocks = self._model.blocks(max(self._args.tokens))
        places = Places(self._args.device, self._args.gpus, pool_blocks)
        async with instances(shape, self._model, places) as sides:
            self.lanes.update(sides.lanes)
            check_lanes(self._args.device, sides.lanes)
            args = self._args
            for case in cases(shape, args.tokens, args.streams, beside=args.beside_prefill):
                await self._case(sides, case)
            for chunk_tokens in args.chunk_tokens:
                await self._pipeline(sides, shape, chunk_tokens)

    async def _case(self, sides: Instances, case: Case) -> None:
        size_bytes = sides.size_bytes(case)
        rounds = rounds_of(
            case, size_bytes, most=self._args.rounds, most_bytes=self._args.case_gb * 1e9
        )
        alone = None
        if case.prefill:
            alone = await sides.load()
        else:
            # Shared slots were checked with fewer streams.
            if sides.apart(case) == case.streams:
                await sides.verify(case)
        try:
            found = [await sides.round(case, raw_first=number % 2 == 0) for number in range(rounds)]
            beside = None if alone is None else await sides.speed() / alone
        finally:
            await sides.calm()
        result = CaseResult(case, size_bytes, sides.apart(case), tuple(found), beside)
        self.results.append(result)
        print(case_line(result), flush=True)

    async def _pipeline(self, sides: Instances, shape: Shape, chunk_tokens: int) -> None:
        case = Case(min(GOAL_TOKENS, max(self._args.tokens)), shape, 1)
        if chunk_tokens > case.tokens:
            return
        blocks, step = self._model.blocks(case.tokens), self._model.blocks(chunk_tokens)
        ends = [*range(step, blocks, step), blocks]
        whole_s, tail_s = [], []
        for _ in range(min(self._args.rounds, PIPELINE_ROUNDS)):
            whole = await sides.pages(case, [(end, 0.0) for end in ends])
            chunk_s = whole.seconds / len(ends) * COMPUTE_OVER_TRANSFER
            pipelined = await sides.pages(case, [(end, chunk_s) for end in ends])
            whole_s.append(whole.seconds)
            tail_s.append(pipelined.end - pipelined.last_done)
        result = PipelineResult(
            case.tokens, str(shape), chunk_tokens, tuple(whole_s), tuple(tail_s)
        )
        self.pipelines.append(result)
        print(pipeline_line(result), flush=True)


def check_lanes(device: str, lanes: Iterable[str]) -> None:
    """Raise RuntimeError when a connection within this host is not over the fast lane."""
    fast = FAST_LANES[device.partition(":")[0]]
    slow = sorted(set(lanes) - {fast})
    if slow:
        raise RuntimeError(
            f"expected every connection within this host over {fast}, got {', '.join(slow)}; see "
            "`pageferry doctor`"
        )


def summary(args: argparse.Namespace, found: Measurement) -> dict[str, Any]:
    """The JSON line without its surroundings."""
    on_device = args.device != "cpu"
    last_chunk = most_last_chunk(args.device, args.gpus)
    quiet = [
        entry for result in found.results for entry in result.rounds if not result.case.prefill
    ]
    return {
        "benchmark": "transfer",
        "device": torch.cuda.get_device_name() if on_device else "cpu",
        "copy_gb_s": round(median(entry.copy_gb_s for entry in quiet), 2),
        "cases": [result.fields() for result in found.results],
        "pipelining": [pipeline.fields() for pipeline in found.pipelines],
        "main_lanes": sorted(found.lanes),
        "void": list(void_reasons(args.device, found.results)),
        "missed": list(missed_goals(found.results, found.pipelines, last_chunk)),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = options.parser("transfer", description)
    parser.add_argument("--device", choices=sorted(FAST_LANES), default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="half for either instance")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 8192, 32768])
    parser.add_argument("--tp", type=Shape.parse, nargs="+", default=["1->1", "2->1", "1->2"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--beside-prefill", type=int, nargs="*", default=[128, 1024, 8192])
    parser.add_argument("--chunk-tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens-per-block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of a case, at most")
    parser.add_argument("--case-gb", type=float, default=20, help="page bytes of a case, about")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.tp = [Shape.parse(shape) if isinstance(shape, str) else shape for shape in args.tp]
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or be a rank."""
    args = parse(arguments)
    torch.set_num_threads(1)
    if args.rank is not None:
        run(RankSpec(**json.loads(args.rank)))
        return
    found = Measurement(args)
    print(CASE_HEADER, flush=True)
    for shape in args.tp:
        asyncio.run(found.measure(shape))
    result = summary(args, found)
    for label in ("void", "missed"):
        for text in result[label]:
            print(f"{label}: {text}")
    finish(result, args.out)
    if result["void"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
