"""``python -m benchmarks.engine``: the engine's speed on one device, with a Llama-shaped model of
random weights (the defaults are those of Llama 3 8B in bfloat16).

    floor_tok_s       tokens a second if a step only read its weights, at a copy's measured rate
    decode_b1_tok_s   one sequence, each token on the host before the next step
    prefill_8k_ms     a prompt of 8,192 tokens in one step
    b64_4k_step_ms    one step of 64 sequences with 4,096 tokens each
    cb_64_tok_s       64 requests of 1,024 tokens for 128 through the engine loop
    cb_256_tok_s      256 requests of 256 tokens for 256
    start_s           from the program's start to the second token: weights (made, not read), pages,
                      compiled kernels, captured graph

A part that fails is null, with its error under ``errors``. ``--kernels-only`` measures each product
and small kernel instead, by tiling, beside torch's. ``--scale`` divides every length and count, for
tiny models on a CPU. Peers are measured by programs of their own.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks import report
from benchmarks.engine import products
from benchmarks.engine.loop import MAX_RUNNING, Load, Loop
from benchmarks.engine.shape import TOKENS_PER_BLOCK, ModelShape, make_model, make_pages
from benchmarks.engine.steps import Steps
from benchmarks.engine.timing import copy_bandwidth
from worker.executor import ModelExecutor
from worker.model.assembly import StepLimits, bucketed_runner

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
COPY_BYTES: Final = 4 << 30
CHUNK_TOKENS: Final = 8192
LONGEST: Final = 8192
SPARE_BLOCKS: Final = 64


class Parts:
    """Figures by name; a part that fails does not take the others with it."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    def add(self, name: str, measured: Callable[[], float]) -> None:
        """Measure, print and keep one figure."""
        try:
            self.figures[name] = round(measured(), 3)
        except Exception as error:  # noqa: BLE001  # reported, and the other parts are worth having
            traceback.print_exc()
            self.figures[name] = None
            self.errors[name] = f"{type(error).__name__}: {error}"
        print(f"{name:16} {self.figures[name]}", flush=True)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument(
        "--depth", type=int, choices=(1, 2), default=1, help="steps under way in the engine loop"
    )
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--out")
    return parser


def main() -> None:
    """Measure and print."""
    began = time.perf_counter()
    options = arguments().parse_args()
    name = torch.device(options.device)
    device = torch.device("cuda", 0) if name.type == "cuda" else name
    dtype = DTYPES[options.dtype]
    shape = ModelShape(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=options.intermediate,
        heads=options.heads,
        kv_heads=options.kv_heads,
        vocab=options.vocab,
    )
    with torch.inference_mode():
        if options.kernels_only:
            found = products.measure(shape, device, dtype)
            result: dict[str, Any] = {"best": products.best(found), "all": found}
            result["copy_gb_s"] = round(_bandwidth(device, options.scale) / 1e9, 1)
        else:
            result = _engine(shape, device, dtype, options, began)
    result["shape"] = vars(shape)
    result["depth"] = options.depth
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
    report.finish(result, options.out)


def _bandwidth(device: torch.device, scale: int) -> float:
    return copy_bandwidth(device, COPY_BYTES // scale)


def _engine(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    options: argparse.Namespace,
    began: float,
) -> dict[str, Any]:
    scale: int = options.scale

    def scaled(number: int) -> int:
        return max(1, number // scale)

    parts = Parts()
    loaded = make_model(shape, device, dtype)
    many, context = scaled(64), scaled(4096)
    blocks = many * -(-(context + 1) // TOKENS_PER_BLOCK) + SPARE_BLOCKS
    blocks = max(blocks, scaled(LONGEST) // TOKENS_PER_BLOCK)
    plan, storage = make_pages(loaded, blocks)
    runner = bucketed_runner(loaded, plan, storage, StepLimits(MAX_RUNNING, LONGEST))
    steps = Steps(runner, device, len(plan.layer_groups))

    def start() -> float:
        steps.decode_tok_s(1, 2)
        return time.perf_counter() - began

    def floor() -> float:
        return _bandwidth(device, scale) / shape.weight_bytes(dtype.itemsize)

    parts.add("start_s", start)
    parts.add("floor_tok_s", floor)
    parts.add("decode_b1_tok_s", lambda: steps.decode_tok_s(scaled(1024), 1 + scaled(128)))
    parts.add("prefill_8k_ms", lambda: steps.prefill_ms(scaled(8192)))
    parts.add("b64_4k_step_ms", lambda: steps.decode_step_ms(many, context))
    loop = Loop(loaded, plan, storage, ModelExecutor(runner, device, options.depth), CHUNK_TOKENS)

    def warm_tok_s(load: Load) -> float:
        # What is met for the first time is compiled and captured, seconds that come once.
        loop.tok_s(load)
        return loop.tok_s(load)

    parts.add("cb_64_tok_s", lambda: warm_tok_s(Load(many, scaled(1024), scaled(128))))
    parts.add("cb_256_tok_s", lambda: warm_tok_s(Load(scaled(256), scaled(256), scaled(256))))
    if parts.figures["floor_tok_s"] and parts.figures["decode_b1_tok_s"]:
        ratio = parts.figures["decode_b1_tok_s"] / parts.figures["floor_tok_s"]
        parts.figures["decode_b1_of_floor"] = round(ratio, 3)
        print(f"decode_b1_of_floor {ratio:.3f}", flush=True)
    return {**parts.figures, "errors": parts.errors}


if __name__ == "__main__":
    main()
