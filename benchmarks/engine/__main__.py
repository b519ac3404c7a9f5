"""``python -m benchmarks.engine``: the engine's speed on one device, beside its peers', with a
Llama-shaped model of random weights (the defaults are those of Llama 3 8B in bfloat16).

    floor_tok_s       tokens a second if a step only read its weights, at a copy's measured rate
    start_s           from the program's start to the second token: imports, weights (made, not
                      read), pages, compiled kernels, captured graph; vLLM: to the first token
    decode_b1_tok_s   one sequence of 1,024 tokens, after its first new one; transformers: dynamic
                      cache, and decode_b1_compiled_tok_s with a static cache and a compiled step
    prefill_8k_ms     a prompt of 8,192 tokens, from the request to its token
    b64_4k_step_ms    from step to step of 64 sequences with 4,096 tokens each
    cb_64_tok_s       64 requests of 1,024 tokens for 128
    cb_256_tok_s      256 requests of 256 tokens for 256

Ours go through the engine loop (scheduler, cache manager, sampler), vLLM's through its own.

The last line is one JSON object: our figures, each peer's under its name; null has its reason under
``absent``. transformers runs in this process and takes turns with us, medians over rounds. vLLM
runs when our memory is free again, with the Python that --vllm-python names. The device's own copy
and matrix product are measured at the start, and before and after vLLM.

--kernels-only measures each product and small kernel instead, by tiling, beside torch's. --scale
divides every length and count, for tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import limits, options, report
from benchmarks.devices import DTYPES, add_device
from benchmarks.engine import products, vllm_peer
from benchmarks.engine.contest import REST_S, Contest, Entrant
from benchmarks.engine.figures import OURS, Figures
from benchmarks.engine.ours import EngineLimits, Ours
from benchmarks.engine.selection import Budget, Selection
from benchmarks.engine.shape import ModelShape
from benchmarks.engine.transformers_peer import TRANSFORMERS, TransformersPeer
from benchmarks.engine.vllm_peer import VLLM
from benchmarks.engine.workloads import KEYS, workloads
from benchmarks.timing import process_age_s


class Comparison:
    """One run over one shape on one device."""

    def __init__(self, given: argparse.Namespace, shape: ModelShape) -> None:
        self._given = given
        self._shape = shape
        self._device: torch.device = given.device
        self._dtype = DTYPES[given.dtype]
        self._asked = workloads(given.scale)
        self._selection = Selection(given.only)
        self._budget = Budget(given.budget_s)
        self._figures = Figures()
        self._limits: list[dict[str, Any]] = []
        self._rest_s = REST_S if self._device.type == "cuda" else 0.0

    def run(self) -> dict[str, Any]:
        """Everything that is asked for."""
        self._here()
        keys = self._selection.keys(VLLM)
        try:
            self._vllm(keys)
        except Exception as error:  # noqa: BLE001  # reported: a device that failed us fails here
            self._figures.failed(VLLM, keys, error)
        for side in (OURS, TRANSFORMERS, VLLM):
            self._figures.left_out(side, self._selection.left_out(side))
        print(self._figures.table(), flush=True)
        return {**self._figures.result(self._floor_tok_s()), "limits": self._limits}

    def _here(self) -> None:
        """What this process measures. All of its memory is free at the end."""
        ours = self._ours()
        self._measure_limits("start")
        peer = self._transformers()
        contest = Contest(
            self._figures, self._selection, self._budget, self._given.rounds, self._rest_s
        )
        for key in KEYS:
            contest.run([side[key] for side in (ours, peer) if key in side])

    def _ours(self) -> dict[str, Entrant]:
        keys = self._selection.keys(OURS)
        if not keys:
            return {}
        try:
            limits = EngineLimits(self._given.depth, self._given.max_batch_tokens)
            made = Ours(self._shape, self._device, self._dtype, self._asked, limits)
            made.first_tokens()
        except Exception as error:  # noqa: BLE001  # reported, and the peers are worth having
            self._figures.failed(OURS, keys, error)
            return {}
        if "start_s" in keys:
            self._figures.add(OURS, "start_s", process_age_s())
        return made.entrants()

    def _transformers(self) -> dict[str, Entrant]:
        keys = self._selection.keys(TRANSFORMERS)
        if not keys:
            return {}
        try:
            made = TransformersPeer(self._shape, self._device, self._dtype, self._asked)
        except Exception as error:  # noqa: BLE001  # as above
            self._figures.failed(TRANSFORMERS, keys, error)
            return {}
        self._figures.tell(TRANSFORMERS, **made.facts)
        self._figures.lacks(TRANSFORMERS, ["start_s"], "it starts in a process that already runs")
        return made.entrants()

    def _vllm(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._given.vllm_python is None:
            reason = "not given: --vllm-python names a Python that has vLLM"
            self._figures.lacks(VLLM, keys, reason)
            return
        self._release()
        self._measure_limits("before vllm")
        left_s = self._budget.left_s()
        if left_s <= 0:
            self._figures.lacks(VLLM, keys, self._budget.reason)
            return
        job = vllm_peer.Job(
            python=self._given.vllm_python,
            shape=self._shape,
            dtype=self._given.dtype,
            workloads=self._asked,
            keys=keys,
            rounds=self._given.rounds,
            rest_s=self._rest_s,
            memory_share=self._free_share(),
            limit_s=left_s,
        )
        vllm_peer.measure(job, self._figures)
        self._measure_limits("after vllm")

    def _measure_limits(self, when: str) -> None:
        found: dict[str, Any] = {"when": when}
        try:
            found |= asdict(limits.measure(self._device))
        except Exception as error:  # noqa: BLE001  # told, and figures are worth having without
            found["error"] = f"{type(error).__name__}: {error}"
        self._limits.append(found)
        print(found, flush=True)

    def _floor_tok_s(self) -> float | None:
        """By the first copy that was measured."""
        copied = [one["copy_gb_s"] * 1e9 for one in self._limits if "copy_gb_s" in one]
        weights = self._shape.weight_bytes(self._dtype.itemsize)
        return round(copied[0] / weights, 3) if copied else None

    def _release(self) -> None:
        """All device memory of this process, compiled graphs' too."""
        gc.collect()
        if self._device.type == "cuda":
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()

    def _free_share(self) -> float:
        if self._device.type != "cuda":
            return 1.0
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(self._device)
        return free / whole - 0.02


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.parser("engine", __doc__)
    add_device(parser)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument(
        "--depth", type=int, choices=(1, 2), default=2, help="steps under way in the engine loop"
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=16384,
        help="of one step of ours; the default is what vLLM takes on this GPU",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of a figure, at most")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="sides, keys or SIDE.KEY"
    )
    parser.add_argument("--vllm-python", help="a Python that has vLLM")
    parser.add_argument(
        "--budget-s", type=float, default=1800, help="no part begins later; vLLM is ended then"
    )
    parser.add_argument("--kernels-only", action="store_true")
    return parser


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options_given = arguments().parse_args(given)
    device: torch.device = options_given.device
    shape = ModelShape(
        layers=options_given.layers,
        hidden=options_given.hidden,
        intermediate=options_given.intermediate,
        heads=options_given.heads,
        kv_heads=options_given.kv_heads,
        vocab=options_given.vocab,
    )
    if options_given.kernels_only:
        with torch.inference_mode():
            found = products.measure(shape, device, DTYPES[options_given.dtype])
            result: dict[str, Any] = {"best": products.best(found), "all": found}
            result["limits"] = asdict(limits.measure(device))
    else:
        result = Comparison(options_given, shape).run()
    result["shape"] = vars(shape)
    result["depth"] = options_given.depth
    result["max_batch_tokens"] = options_given.max_batch_tokens
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
    report.finish(result, options_given.out)


if __name__ == "__main__":
    main()
