"""GB/s of weights read by each product of a layer, ours by tiling and torch's; and the time of each
small kernel.

Every measurement goes in turn over copies of its matrix that no cache holds together, as the
layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import linear

from benchmarks.engine.shape import ModelShape
from benchmarks.timing import device_seconds
from worker.model.kernels.activation import silu_product
from worker.model.kernels.rotary import Places, Rotary, rotate_and_store
from worker.model.kernels.skinny import (
    Matrix,
    Norm,
    Tiling,
    gated_product,
    product,
    tiling_of,
)
from worker.model.products import RowNorm

BEYOND_CACHES: Final = 400 << 20
"""Bytes of all copies of a matrix together, where the device has such caches."""
ONE_ROW: Final = (
    Tiling(4, 1024, 4, 2),
    Tiling(8, 512, 4, 3),
    Tiling(8, 1024, 8, 2),
    Tiling(16, 256, 4, 3),
    Tiling(16, 512, 8, 2),
    Tiling(32, 128, 4, 3),
    Tiling(2, 2048, 8, 2),
)
FEW_ROWS: Final = (
    Tiling(16, 256, 4, 4),
    Tiling(32, 128, 4, 5),
    Tiling(32, 256, 4, 3),
    Tiling(64, 128, 4, 4),
    Tiling(64, 64, 4, 6),
)
ROWS: Final = (1, 8)
Case = Callable[[torch.Tensor], object]
"""Something to do with one copy of a matrix."""


def measure(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One line a measurement, printed as they come; best tilings first told by ``best``."""
    found: list[dict[str, Any]] = []
    for name, (num_out, num_in) in shape.products.items():
        weights = _copies(num_out, num_in, device, dtype)
        for num_rows in ROWS:
            found += _product(name, weights, num_rows)
        del weights
    found += _small(shape, device, dtype)
    return found


def best(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest way of each product and number of rows."""
    fastest: dict[str, dict[str, Any]] = {}
    for one in found:
        if "gb_s" in one:
            key = f"{one['name']} x {one['rows']}"
            if key not in fastest or one["gb_s"] > fastest[key]["gb_s"]:
                fastest[key] = one
    return fastest


def _copies(
    num_out: int, num_in: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    size = num_out * num_in * dtype.itemsize
    count = max(1, -(-BEYOND_CACHES // size)) if device.type == "cuda" else 1
    return [torch.randn(num_out, num_in, device=device, dtype=dtype) for _ in range(count)]


def _product(name: str, weights: list[torch.Tensor], num_rows: int) -> list[dict[str, Any]]:
    weight = weights[0]
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    norm = Norm(torch.ones_like(rows[0]), 1e-5)
    residual = torch.zeros(num_rows, len(weight), device=weight.device, dtype=weight.dtype)
    cases: dict[str, Case] = {"torch": lambda one: linear(rows, one)}
    num_out = len(weight) // 2 if name == "gate_up" else len(weight)
    own = tiling_of(num_rows, num_out, weight.shape[1])
    swept = ONE_ROW if num_rows == 1 else FEW_ROWS
    # An interpreter's times mean nothing: one beside the chosen one shows that others run.
    others = swept if weight.device.type == "cuda" else swept[-1:]
    for tiling in dict.fromkeys((own, *others)):
        cases[_text(tiling, chosen=tiling == own)] = _case(name, rows, norm, residual, tiling)
    return [_timed(name, way, case, weights, num_rows) for way, case in cases.items()]


def _case(
    name: str, rows: torch.Tensor, norm: Norm, residual: torch.Tensor, tiling: Tiling
) -> Case:
    """As the layer calls it: norm before, activation or residual after."""
    if name == "gate_up":
        return lambda one: gated_product(rows, Matrix(one, None), norm=norm, tiling=tiling)
    if name in {"qkv", "head"}:
        return lambda one: product(rows, Matrix(one, None), norm=norm, tiling=tiling)
    return lambda one: product(rows, Matrix(one, None), residual=residual, tiling=tiling)


def _text(tiling: Tiling, *, chosen: bool) -> str:
    text = f"out {tiling.block_out} in {tiling.block_in} w{tiling.warps} s{tiling.stages}"
    return f"{text} (chosen)" if chosen else text


def _timed(
    name: str, way: str, case: Case, weights: list[torch.Tensor], num_rows: int
) -> dict[str, Any]:
    def work() -> None:
        for weight in weights:
            case(weight)

    weight = weights[0]
    line: dict[str, Any] = {"name": name, "rows": num_rows, "way": way}
    try:
        taken = device_seconds(work, weight.device) / len(weights)
    except Exception as error:  # noqa: BLE001  # one tiling that does not compile is a result too
        line["error"] = f"{type(error).__name__}: {error}"[:120]
        print(f"{name:8} x {num_rows:2}  {way:32} {line['error']}", flush=True)
        return line
    line["us"] = round(taken * 1e6, 2)
    line["gb_s"] = round(weight.numel() * weight.element_size() / taken / 1e9, 1)
    print(f"{name:8} x {num_rows:2}  {way:32} {line['us']:9} us {line['gb_s']:8} GB/s", flush=True)
    return line


def _small(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Microseconds of what stands between products, in a row as in a step."""
    found: list[dict[str, Any]] = []
    dim, kv_heads = shape.head_dim, shape.kv_heads
    num_heads = shape.heads + 2 * kv_heads
    pages = torch.zeros(64, 2, kv_heads, 64, dim, device=device, dtype=dtype)
    for num_rows in (1, 64) if device.type == "cuda" else (1,):
        heads = torch.randn(num_rows, num_heads, dim, device=device, dtype=dtype)
        angles = torch.zeros(num_rows, dim, device=device, dtype=dtype)
        index = torch.arange(num_rows, device=device, dtype=torch.int32)
        hidden = torch.randn(num_rows, shape.hidden, device=device, dtype=dtype)
        gate_up = torch.randn(num_rows, 2 * shape.intermediate, device=device, dtype=dtype)
        norm = RowNorm(torch.ones(shape.hidden, device=device, dtype=dtype), 1e-5)
        rotary, places = Rotary(angles, angles), Places(index, index % 64)
        cases: dict[str, Callable[[], object]] = {
            "rotate_and_store": _bound(rotate_and_store, heads, rotary, None, places, pages),
            "silu_product": _bound(silu_product, gate_up),
            "torch rms_norm": _bound(norm, hidden),
        }
        for name, case in cases.items():
            taken = device_seconds(_repeated(case, 32), device) / 32
            found.append({"name": name, "rows": num_rows, "us": round(taken * 1e6, 2)})
            print(f"{name:16} x {num_rows:2} {found[-1]['us']:9} us", flush=True)
    return found


def _bound(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _repeated(case: Callable[[], object], times: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            case()

    return work
