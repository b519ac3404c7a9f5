"""``python -m benchmarks.device_copies``: gather and scatter passes of a device, beside its plain
copy of as many bytes.

GB/s are bytes of the message a second; a pass and the copy read and write each of them once.
Layouts are those of an 8B-class model (36 layers, 8 kv heads, head_dim 128, bf16, 64 tokens a
block) where half of the heads go from or to each page, or where pages hold 32 tokens at the
receiver; then every other unit of a slot, for units of 2 bytes to 64 KiB. Slots have no order, and
slots and messages change from call to call, so that no cache holds them. "staged" is what a pair's
queue sees: messages of the usual size through the staging thread, four at a time or one, from the
call to the callback.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from benchmarks import options, report
from benchmarks.devices import add_device
from benchmarks.timing import wait
from transfer.copy_plan import CopyPlan, Slots
from transfer.plan import Fragment, GroupPlan, GroupSide
from transfer.staging_buffers import STAGING_BUFFERS
from worker.device_copies import DeviceCopies, IndexedUnits
from worker.device_staging import DeviceStaging

PAGE_BYTES: Final = 64 * 8 * 128 * 2
PAGES: Final = 36 * 2
UNITS: Final = (2, 4, 8, 16, 64, 512, 2048, 8192, 16384, 65536)
UNIT_SLOT_BYTES: Final = 1 << 20
ROUNDS: Final = 5
CALLS: Final = 12
TURNS: Final = 4
"""Different slots and messages used in turn."""


@dataclass(frozen=True)
class Layout:
    """A group between two ranks that share one pool here."""

    name: str
    plan: CopyPlan
    slot_bytes: int


def halves(name: str, sender_page: int, receiver_page: int) -> Layout:
    """The first half of the heads of every page, from pages that hold all or only those."""
    half = PAGE_BYTES // 2
    return Layout(
        name,
        _plan(
            PAGES * sender_page,
            PAGES * receiver_page,
            [(page * sender_page, page * receiver_page, half) for page in range(PAGES)],
        ),
        PAGES * max(sender_page, receiver_page),
    )


def smaller_pages() -> Layout:
    """Pages of 64 tokens there, of 32 here: a run is 32 tokens of a head."""
    run, heads = PAGE_BYTES // 16, 8
    pieces = [
        (
            page * PAGE_BYTES + head * 2 * run + part * run,
            page * PAGE_BYTES + part * heads * run + head * run,
            run,
        )
        for page in range(PAGES)
        for head in range(heads)
        for part in range(2)
    ]
    return Layout(
        "pages of 64 -> 32",
        _plan(PAGES * PAGE_BYTES, PAGES * PAGE_BYTES, pieces),
        PAGES * PAGE_BYTES,
    )


def every_other(unit: int) -> Layout:
    """Every other unit of a slot, to the other half of the units."""
    pieces = [(start, start + unit, unit) for start in range(0, UNIT_SLOT_BYTES, 2 * unit)]
    plan = _plan(UNIT_SLOT_BYTES, UNIT_SLOT_BYTES, pieces)
    return Layout(f"units of {unit}", plan, UNIT_SLOT_BYTES)


def _plan(sender: int, receiver: int, pieces: list[tuple[int, int, int]]) -> CopyPlan:
    fragments = tuple(Fragment(0, here, 0, there, size) for here, there, size in pieces)
    return CopyPlan.of(
        GroupPlan(GroupSide(0, 0, (sender,)), GroupSide(0, 0, (receiver,)), fragments)
    )


class Bench:
    """Pools and messages of one device."""

    def __init__(self, device: torch.device, pool_bytes: int, message_bytes: int) -> None:
        self._device = device
        self._memory = torch.zeros(pool_bytes, dtype=torch.uint8, device=device)
        self._messages = [
            torch.zeros(message_bytes, dtype=torch.uint8, device=device) for _ in range(2 * TURNS)
        ]
        self._random = np.random.default_rng(1)

    def case(self, layout: Layout, copies: DeviceCopies) -> dict[str, Any]:
        """Medians of one layout, copy and passes interleaved."""
        plan = layout.plan
        blocks = max(1, self._messages[0].numel() // plan.block_bytes)
        size = blocks * plan.block_bytes
        pools = {side: self._pool(plan, side) for side in ("sender", "receiver")}
        turns = [self._turn(pools, blocks) for _ in range(TURNS)]
        messages = [message[:size] for message in self._messages]

        def copy(turn: int) -> None:
            messages[turn].copy_(messages[turn + TURNS])

        def gather(turn: int) -> None:
            copies.gather(plan, [pools["sender"]], turns[turn][0], messages[turn])

        def scatter(turn: int) -> None:
            copies.scatter(plan, messages[turn], [pools["receiver"]], turns[turn][1])

        seconds = self._measure({"copy": copy, "gather": gather, "scatter": scatter})
        rates = {name: size / one / 1e9 for name, one in seconds.items()}
        return {
            "layout": layout.name,
            "unit_bytes": min(part.unit_bytes for part in plan.parts),
            "message_bytes": size,
            "copy_gb_s": round(rates["copy"], 1),
            "gather_gb_s": round(rates["gather"], 1),
            "scatter_gb_s": round(rates["scatter"], 1),
            "gather_ratio": round(rates["gather"] / rates["copy"], 3),
            "scatter_ratio": round(rates["scatter"] / rates["copy"], 3),
        }

    def _pool(self, plan: CopyPlan, side: str) -> torch.Tensor:
        (part,) = plan.parts
        end = part.sender if side == "sender" else part.receiver
        slot_bytes = end.slot_units * part.unit_bytes
        slots = self._memory.numel() // slot_bytes
        return self._memory[: slots * slot_bytes].view(slots, slot_bytes)

    def _turn(self, pools: dict[str, torch.Tensor], blocks: int) -> tuple[Slots, Slots]:
        sender, receiver = (
            self._random.permutation(len(pools[side]))[:blocks].astype(np.int32)
            for side in ("sender", "receiver")
        )
        return sender, receiver

    def _measure(self, works: dict[str, Callable[[int], None]]) -> dict[str, float]:
        """Seconds of one call of each, in the median of several rounds."""
        found: dict[str, list[float]] = {name: [] for name in works}
        for number in range(ROUNDS + 1):
            for name, work in works.items():
                wait(self._device)
                started = time.perf_counter()
                for call in range(CALLS):
                    work(call % TURNS)
                wait(self._device)
                if number:  # the first compiles and warms up
                    found[name].append((time.perf_counter() - started) / CALLS)
        return {name: statistics.median(samples) for name, samples in found.items()}

    async def staged(self, layout: Layout) -> dict[str, Any]:
        """Messages through the staging thread."""
        plan = layout.plan
        pools = {
            number: [self._pool(plan, side)] for number, side in enumerate(("sender", "receiver"))
        }
        staging = DeviceStaging.on(self._device, pools)
        blocks = max(1, min(staging.message_bytes, self._messages[0].numel()) // plan.block_bytes)
        message_bytes = blocks * plan.block_bytes
        buffers = [staging.message(message_bytes) for _ in range(STAGING_BUFFERS)]
        slots = [
            self._turn({"sender": pools[0][0], "receiver": pools[1][0]}, blocks)
            for _ in range(STAGING_BUFFERS)
        ]

        def start(way: str, number: int, over: Callable[[str], None]) -> None:
            sender, receiver = slots[number]
            if way == "gather":
                staging.gather(plan, 0, sender, buffers[number], over)
            elif way == "scatter":
                staging.scatter(plan, buffers[number], 1, receiver, over)
            else:
                staging.gather(plan, 0, sender[:1], buffers[number][: plan.block_bytes], over)

        found: dict[str, Any] = {
            "layout": layout.name,
            "staging_message_bytes": staging.message_bytes,
            "message_bytes": message_bytes,
        }
        for way in ("gather", "scatter"):
            together = await _rate(start, way, STAGING_BUFFERS)
            found[f"{way}_gb_s"] = round(STAGING_BUFFERS * message_bytes / together / 1e9, 1)
            found[f"{way}_us"] = round(await _rate(start, way, 1) * 1e6, 1)
        found["one_block_us"] = round(await _rate(start, "one", 1) * 1e6, 1)
        return found


async def _rate(
    start: Callable[[str, int, Callable[[str], None]], None], way: str, together: int
) -> float:
    """Seconds of ``together`` passes asked for at once, median."""
    samples = []
    for _ in range(ROUNDS * TURNS):
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(together)]
        started = time.perf_counter()
        for number, end in enumerate(ends):
            start(way, number, end.set_result)
        failures = await asyncio.gather(*ends)
        samples.append(time.perf_counter() - started)
        if any(failures):
            raise RuntimeError(f"a {way} failed: {failures}")
    return statistics.median(samples)


def layouts() -> Iterator[Layout]:
    """All of them."""
    yield halves("8B tp 2 -> 1", PAGE_BYTES // 2, PAGE_BYTES)
    yield halves("8B tp 1 -> 2", PAGE_BYTES, PAGE_BYTES // 2)
    yield smaller_pages()
    for unit in UNITS:
        yield every_other(unit)


def main() -> None:
    """Print a table and one line of JSON."""
    parser = options.parser("device_copies", __doc__)
    add_device(parser)
    parser.add_argument("--pool-mib", type=int, default=8192, help="memory that slots lie in")
    parser.add_argument("--message-mib", type=int, default=256, help="bytes of one pass")
    parser.add_argument("--torch", action="store_true", help="torch's copies instead of kernels")
    arguments = parser.parse_args()
    if arguments.message_mib << 20 < PAGES * PAGE_BYTES:
        parser.error(f"--message-mib: expected room for a block of {PAGES * PAGE_BYTES} bytes")
    device = arguments.device
    copies = DeviceCopies(IndexedUnits())
    if device.type == "cuda" and not arguments.torch:
        from worker.device_kernels import TritonUnits

        copies = DeviceCopies(TritonUnits())
    bench = Bench(device, arguments.pool_mib << 20, arguments.message_mib << 20)
    print(f"{'layout':20} {'unit':>6} {'MB':>6} {'copy':>7} {'gather':>7} {'':>5} {'scatter':>7}")
    cases = []
    for layout in layouts():
        case = bench.case(layout, copies)
        cases.append(case)
        print(
            f"{case['layout']:20} {case['unit_bytes']:6} {case['message_bytes'] / 1e6:6.0f} "
            f"{case['copy_gb_s']:7.0f} {case['gather_gb_s']:7.0f} {case['gather_ratio']:5.2f} "
            f"{case['scatter_gb_s']:7.0f} {case['scatter_ratio']:5.2f}",
            flush=True,
        )
    staged = [asyncio.run(bench.staged(layout)) for layout in list(layouts())[:3]]
    for one in staged:
        print(
            f"{one['layout']:20} staged, {one['message_bytes'] / 1e6:.0f} MB: "
            f"gather {one['gather_gb_s']:.0f} GB/s, one {one['gather_us']:.0f} us; "
            f"scatter {one['scatter_gb_s']:.0f} GB/s, one {one['scatter_us']:.0f} us; "
            f"one block {one['one_block_us']:.0f} us"
        )
    report.finish(
        {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "moved_by": "torch" if arguments.torch or device.type != "cuda" else "kernels",
            "copy_gb_s": max(case["copy_gb_s"] for case in cases),
            "cases": cases,
            "staged": staged,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
