"""``python -m benchmarks.attention``: the ``triton`` backend's kernels beside a copy, a matmul and
torch's attention, all measured in this run.

Decodes are rated by keys and values read, prefills by operations over visible keys. A call is one
layer's: the new rows written, then attention. ``--device cpu`` runs tiny cases in Triton's
interpreter, whose times mean nothing. ``--sweep`` also measures other tile sizes for the main
cases, of the Triton kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
import triton

from benchmarks import limits, options, report
from benchmarks.attention.cases import CASES, Case, tiny_cases
from benchmarks.attention.memory import Memory
from benchmarks.devices import add_device
from benchmarks.limits import Limits
from benchmarks.timing import device_seconds, wait
from worker.model.kernels.scoring import LOG2_E
from worker.model.kernels.tilings import Tiling
from worker.model.triton_attention import TritonAttention, decode, prefill, read

MOST_BYTES: Final = 12 << 30
"""Pages of one case."""
LAYERS: Final = 8
SWEPT: Final = ("decode 1 x 4k", "decode 64 x 4k", "decode 64 x 4k, fp8", "prefill 8k")
DECODE_TILINGS: Final = [
    (Tiling(1, keys, warps, stages), splits)
    for keys, warps, stages in ((32, 4, 5), (64, 4, 3), (64, 4, 5), (64, 4, 7), (128, 4, 3))
    for splits in (4, 16, 64)
]
PREFILL_TILINGS: Final = [
    Tiling(queries, keys, warps, stages)
    for queries, keys, warps in ((128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4))
    for stages in (3, 5)
]


def layers_for(case: Case, device: torch.device) -> int:
    """Layers to take turns: fewer where their pages would not fit."""
    tokens = sum(start + count for start, count in case.lengths)
    layer = tokens * 2 * case.kv_heads * case.dim * case.page_dtype.itemsize
    return min(LAYERS, max(2, MOST_BYTES // layer)) if device.type == "cuda" else 1


def measured(case: Case, device: torch.device, most: Limits) -> dict[str, Any]:
    """One case's figures."""
    memory = Memory(case, device, layers_for(case, device))
    attention = TritonAttention(memory.pages)
    scale = case.dim**-0.5
    started = time.perf_counter()
    attention.attend(memory.metadata, 0, memory.query, memory.new, scale, case.softcap)
    wait(device)
    first = time.perf_counter() - started

    def work() -> None:
        for index in range(len(memory.pages)):
            attention.attend(memory.metadata, index, memory.query, memory.new, scale, case.softcap)

    spent = device_seconds(work, device) / len(memory.pages)
    found = {"case": case.name, "us": round(spent * 1e6, 1), "first_call_s": round(first, 2)}
    found |= rates(case, spent, most)
    if case.is_plain:
        found |= beside_torch(memory, spent, device)
    return found


def rates(case: Case, spent: float, most: Limits) -> dict[str, float]:
    """Work a second, and its share of the limit that bounds it."""
    if case.is_decode:
        rate = case.kv_bytes / spent / 1e9
        return {"gb_s": round(rate, 1), "of_copy": round(rate / most.copy_gb_s, 3)}
    rate = case.flops / spent / 1e12
    return {"tflop_s": round(rate, 2), "of_matmul": round(rate / most.matmul_tflop_s, 3)}


def beside_torch(memory: Memory, spent: float, device: torch.device) -> dict[str, float]:
    """torch's attention over the same keys and values, contiguous: its time against ours, and the
    largest difference of the results.
    """
    case = memory.case
    taken = memory.gathered()
    expected = memory.torch_attention(*taken).transpose(1, 2).flatten(0, 1)
    found = read(memory.pages[0], memory.metadata, memory.query, case.dim**-0.5)
    apart = (found.float() - expected.float()).abs().max().item()
    theirs = device_seconds(lambda: memory.torch_attention(*taken), device)
    return {
        "torch_us": round(theirs * 1e6, 1),
        "times_torch": round(theirs / spent, 2),
        "largest_difference": round(apart, 5),
    }


def sweep(case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """Other tile sizes for one case, attention alone."""
    memory = Memory(case, device, layers_for(case, device))
    out = torch.empty_like(memory.query)
    scoring = (case.dim**-0.5 * LOG2_E, 0.0)
    step = (memory.metadata, memory.query, out, scoring)

    def timed(call: Callable[..., None], *rest: object) -> float | str:
        def work() -> None:
            for pages in memory.pages:
                call(pages, *step, *rest)

        try:
            return round(device_seconds(work, device) / len(memory.pages) * 1e6, 1)
        except Exception as error:  # noqa: BLE001  # a tile that does not fit is a result here
            return f"{type(error).__name__}: {error}"[:90]

    if case.is_decode:
        for tiling, splits in DECODE_TILINGS:
            spent = timed(decode, tiling, splits)
            yield {"case": case.name, "tiling": str(tiling), "splits": splits, "us": spent}
        return
    for tiling in PREFILL_TILINGS:
        spent = timed(prefill, tiling)
        yield {"case": case.name, "tiling": str(tiling), "us": spent}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a case and the whole as one JSON object."""
    parser = options.parser("attention", __doc__)
    add_device(parser)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--sweep", action="store_true", help="measure other tile sizes too")
    given = parser.parse_args(arguments)
    device = given.device
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise SystemExit("expected TRITON_INTERPRET=1 in the environment for --device cpu")
    most = limits.measure(device)
    print(most, flush=True)
    cases = tiny_cases() if device.type == "cpu" else CASES
    chosen = [case for case in cases if given.only in case.name]
    results = []
    for case in chosen:
        results.append(measured(case, device, most))
        print(*(f"{name}={value}" for name, value in results[-1].items()), sep="  ", flush=True)
    swept = []
    for case in chosen if given.sweep else ():
        for result in sweep(case, device) if case.name in SWEPT else ():
            swept.append(result)
            print(*(f"{name}={value}" for name, value in result.items()), sep="  ", flush=True)
    report.finish({"limits": asdict(most), "cases": results, "sweep": swept}, given.out)


if __name__ == "__main__":
    main()
