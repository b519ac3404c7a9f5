"""``python -m benchmarks.transfer``: pages of one long prompt between two processes, against one
raw UCX message of the same size.

Two transfer agents as in two workers, each with its pools on ``--device``; no model computes. What
is timed is a request from the moment its pages are allocated to the moment the generation side has
the first token. Four ways, interleaved, medians:

    raw        one message over an endpoint of its own: the limit
    whole      neighbouring slots, the prompt in one chunk: one message
    chunks     neighbouring slots, chunks of ``--chunk-tokens``, as a prefill finishes them
    scattered  no two slots of the receiver are neighbours: a message a block

Pages lie alike on both sides, so none is staged: passes over memory beside the message are 0. Bytes
are compared after the last round of each way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from benchmarks.report import finish
from kvcache_core.arithmetic import ceil_div
from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType, KVCacheLayerOwner, KVCacheLayerSpec
from kvcache_core.storage import TorchStorage
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    SessionEnded,
)
from transfer.costs import TransferCosts
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease, views_of_groups
from transfer.messages import ChoiceHandoff, HandoffData
from transfer.outcome import Outcome, PostStatus
from transfer.page_table import page_table_of
from transfer.rank_info import EngineFacts, ParallelShape, RankInfo
from transfer.transport import (
    OPENING_BYTES,
    Completion,
    Endpoint,
    TransportAddress,
    TransportError,
    main_lane,
)
from transfer.ucx.transport import UcxTransport
from worker.page_memory import StoragePages

HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 60.0
TOKENS_PER_BLOCK: Final = 64
RAW_TAG: Final = 1
ASK_TAG: Final = 2
RUNS_ONLY: Final = TransferCosts(message_us=0)
"""Where messages cost nothing, no short runs are staged."""
WAYS: Final = ("whole", "chunks", "scattered")


@dataclass(frozen=True)
class Shape:
    """What is transferred, and from where to where."""

    device: str
    tokens: int
    chunk_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    token: str

    @property
    def blocks(self) -> int:
        return ceil_div(self.tokens, TOKENS_PER_BLOCK)

    def plan(self) -> LayoutPlan:
        specs = [
            KVCacheLayerSpec(
                layer_id=layer,
                owner=KVCacheLayerOwner.TARGET,
                dtype=ElementType.BFLOAT16,
                num_kv_heads=self.kv_heads,
                head_dim=self.head_dim,
            )
            for layer in range(self.layers)
        ]
        return LayoutPlan.derive(specs, tokens_per_block=TOKENS_PER_BLOCK)


class Lease(TransferLease):
    """Pages that nobody else wants."""

    def __init__(self, first_block: int, slots: npt.NDArray[np.int32]) -> None:
        self.first_block = first_block
        self.end_block = first_block + len(slots)
        self._slots = slots

    @override
    def slots(self, view: int) -> npt.NDArray[np.int32]:
        return self._slots

    @override
    def release(self) -> None:
        """Nothing to give back."""

    @override
    def quarantine(self) -> None:
        """Nothing to keep."""


class Side:
    """One process: pools, an agent, and a transport for the raw message."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.shape = shape
        self.plan = shape.plan()
        self.storage = TorchStorage(self.plan, [self.slots], shape.device)
        cuda_device = self.storage.pool_bytes(0, 0).device.index
        self.raw = UcxTransport(HOST, cuda_device=cuda_device)
        self.memory = StoragePages(self.storage)
        info = _rank_info(name, self.plan, shape)
        self.agent = TransferAgent(
            rank_info=info,
            instance=(info,),
            views=views_of_groups(self.plan),
            transport=UcxTransport(HOST, cuda_device=cuda_device),
            memory=self.memory,
            config=AgentConfig(host=HOST, cluster_token=shape.token, costs=RUNS_ONLY),
            deliver=self.handle,
        )

    @property
    def slots(self) -> int:
        """Twice as many as blocks, so that the slots of one prompt need not be neighbours."""
        return 2 * self.shape.blocks

    @property
    def whole(self) -> object:
        """Memory of as many slots as a prompt has blocks."""
        return self.memory.region(0, 0, 0, self.shape.blocks)

    def handle(self, event: AgentEvent) -> None:
        """An event of the agent."""
        raise NotImplementedError


class Context(Side):
    """The other process: serves each grant in the way that its request id names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__("context", shape)
        fill(self.storage)

    @override
    def handle(self, event: AgentEvent) -> None:
        if not isinstance(event, GrantReceived):
            return
        name = event.request_id
        blocks = self.shape.blocks
        step = self.shape.chunk_tokens // TOKENS_PER_BLOCK if name.startswith("chunks") else blocks
        self.agent.announce(name)
        for start in range(0, blocks, step):
            end = min(start + step, blocks)
            self.agent.ship(name, start, end, Lease(start, np.arange(start, end, dtype=np.int32)))
        choice = ChoiceHandoff(token=1)
        self.agent.hand_off(name, HandoffData(choices=(choice,), cached_tokens=0))

    async def run(self) -> None:
        """Say where to dial; answer raw requests until the other side has gone."""
        address = await self.agent.start()
        await self.raw.start()
        opening = secrets.token_bytes(OPENING_BYTES)
        expectation = await self.raw.expect(opening)
        here = {
            "peer": address.model_dump(),
            "port": expectation.address.port,
            "opening": opening.hex(),
        }
        print(json.dumps(here), flush=True)
        endpoint = await expectation.endpoint
        asked = np.zeros(1, dtype=np.uint8)
        while True:
            await posted(endpoint, asked, ASK_TAG, receive=True)
            if not asked[0]:
                break
            await posted(endpoint, self.whole, RAW_TAG, receive=False)
        await self.agent.close()
        await self.raw.close()


class Generation(Side):
    """This process: asks, and takes the time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__("generation", shape)
        self._waiting: dict[tuple[type, str], asyncio.Future[Any]] = {}
        self.endpoint: Endpoint | None = None
        self.source: PeerAddress | None = None

    @override
    def handle(self, event: AgentEvent) -> None:
        waiting = self._waiting.pop((type(event), event.request_id), None)
        if waiting is not None:
            waiting.set_result(event)

    def expect(self, kind: type, name: str) -> asyncio.Future[Any]:
        """The next event of this kind for this request."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[kind, name] = future
        return future

    async def connect(self, there: Mapping[str, Any]) -> Self:
        """Dial both ways."""
        self.source = PeerAddress.model_validate(there["peer"])
        await self.agent.start()
        await self.agent.warm(self.source)
        await self.raw.start()
        self.endpoint = await self.raw.connect(
            TransportAddress(HOST, there["port"]),
            bytes.fromhex(there["opening"]),
            timeout_s=TIMEOUT_S,
        )
        return self

    async def ask(self, wanted: int) -> None:
        """1: send the raw message. 0: end."""
        assert self.endpoint is not None
        word = np.full(1, wanted, dtype=np.uint8)
        await posted(self.endpoint, word, ASK_TAG, receive=False)

    async def raw_seconds(self) -> float:
        """One message of all bytes."""
        assert self.endpoint is not None
        arrived = posted(self.endpoint, self.whole, RAW_TAG, receive=True)
        started = time.perf_counter()
        await self.ask(1)
        await arrived
        return time.perf_counter() - started

    async def seconds(self, way: str, number: int) -> float:
        """One request."""
        assert self.source is not None
        name = f"{way}-{number}"
        announced = self.expect(AnnounceReceived, name)
        handed, over = self.expect(HandoffReceived, name), self.expect(LeaseEnded, name)
        ended = self.expect(SessionEnded, name)
        self.agent.grant(name, (self.source,), self.shape.tokens, int(TIMEOUT_S * 1e3))
        await announced
        lease = Lease(0, self.slots_of(way))
        started = time.perf_counter()
        self.agent.ready(name, 0, self.shape.blocks, lease)
        await handed
        took = time.perf_counter() - started
        await over
        end: SessionEnded = await ended
        expected = self.shape.blocks * self.plan.pool_groups[0].slot_bytes[0]
        if end.outcome is not Outcome.SUCCEEDED or end.transferred_bytes != expected:
            raise RuntimeError(f"{name}: {end}, expected {expected} bytes")
        return took

    def slots_of(self, way: str) -> npt.NDArray[np.int32]:
        """Slots of this side for a prompt's blocks."""
        blocks = np.arange(self.shape.blocks, dtype=np.int32)
        return 2 * blocks if way == "scattered" else blocks

    def check(self, way: str) -> None:
        """Every byte is that of the other side. Raises RuntimeError."""
        pages = self.storage.pool_bytes(0, 0)[torch.from_numpy(self.slots_of(way)).long()]
        if not torch.equal(pages[:, -1].cpu(), stamps(self.shape.blocks)):
            raise RuntimeError(f"{way}: pages in the wrong place")
        reference = TorchStorage(self.plan, [self.slots], self.shape.device)
        fill(reference)
        if not torch.equal(pages, reference.pool_bytes(0, 0)[: self.shape.blocks]):
            raise RuntimeError(f"{way}: bytes differ")


def stamps(slots: int) -> torch.Tensor:
    """The last byte of each slot: never 0, different for neighbours."""
    return (torch.arange(slots) % 251 + 1).to(torch.uint8)


def fill(storage: TorchStorage) -> None:
    """Noise that both processes can make, and a stamp at the end of each slot."""
    pool = storage.pool_bytes(0, 0)
    slots, slot_bytes = pool.shape
    noise = torch.arange(slot_bytes, device=pool.device) * 2654435761 >> 7
    for slot in range(slots):
        pool[slot] = (noise * (2 * slot + 1) & 0xFF).to(torch.uint8)
    pool[:, -1] = stamps(slots).to(pool.device)
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)


def copy_gb_per_s(shape: Shape, size_bytes: int) -> float:
    """Bytes copied by one pass within the device, per second."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=shape.device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(7):
        if source.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return size_bytes / statistics.median(seconds) / 1e9


def posted(endpoint: Endpoint, buffer: object, tag: int, *, receive: bool) -> asyncio.Future[None]:
    """Done when the request has ended well."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish_one(completion: Completion) -> None:
        if completion.status is PostStatus.DONE:
            ended.set_result(None)
        else:
            ended.set_exception(TransportError(completion.reason))

    post = endpoint.post_receive if receive else endpoint.post_send
    post(buffer, tag, finish_one)
    return ended


def _rank_info(name: str, plan: LayoutPlan, shape: Shape) -> RankInfo:
    facts = EngineFacts(
        model="none", model_hash="none", rope=(), kv_dtype="bfloat16", attention="grouped"
    )
    return RankInfo(
        incarnation=Incarnation.mint(name),
        rank=0,
        shape=ParallelShape(),
        layers_per_stage=(shape.layers,),
        tokens_per_block=plan.tokens_per_block,
        engine=facts,
        page_table=page_table_of(plan, ParallelShape()),
        data_host="",
        data_port=0,
    )


async def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Start the other process, time every way, end it."""
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.transfer", "--context", json.dumps(asdict(shape))),
        stdout=asyncio.subprocess.PIPE,
    )
    assert other.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S * 5):
            side = Generation(shape)
            await side.connect(json.loads(await other.stdout.readline()))
            assert side.endpoint is not None
            lanes = side.endpoint.lanes
            seconds: dict[str, list[float]] = {way: [] for way in ("raw", *WAYS)}
            for number in range(rounds + 1):
                for way in seconds:
                    if number == rounds:
                        side.storage.pool_bytes(0, 0).zero_()
                        synchronize(shape)
                    took = side.seconds(way, number) if way != "raw" else side.raw_seconds()
                    seconds[way].append(await took)
                    if number == rounds:
                        side.check(way)
            await side.ask(0)
            await other.wait()
            await side.agent.close()
            await side.raw.close()
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()
    size_bytes = shape.blocks * side.plan.pool_groups[0].slot_bytes[0]
    # The first round opens memory handles.
    medians = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    return {
        "device": torch.cuda.get_device_name() if shape.device != "cpu" else "cpu",
        "lanes": lanes,
        "main_lane": main_lane(lanes),
        "tokens": shape.tokens,
        "blocks": shape.blocks,
        "block_bytes": side.plan.pool_groups[0].slot_bytes[0],
        "bytes": size_bytes,
        "rounds": rounds,
        "passes": 0,
        "copy_gb_per_s": round(copy_gb_per_s(shape, size_bytes), 1),
        "first_ms": {way: round(times[0] * 1e3, 3) for way, times in seconds.items()},
        "ms": {way: round(median * 1e3, 3) for way, median in medians.items()},
        "gb_per_s": {way: round(size_bytes / median / 1e9, 2) for way, median in medians.items()},
        "time_over_raw": {way: round(medians[way] / medians["raw"], 2) for way in WAYS},
    }


def synchronize(shape: Shape) -> None:
    """Wait for the device."""
    if shape.device != "cpu":
        torch.cuda.synchronize()


def show(result: Mapping[str, Any]) -> None:
    """The table."""
    print(f"{result['bytes'] / 1e6:.0f} MB over {result['main_lane']}, {result['device']}")
    print(f"one copy within the device: {result['copy_gb_per_s']} GB/s")
    for way, milliseconds in result["ms"].items():
        ratio = result["time_over_raw"].get(way, 1.0)
        speed = result["gb_per_s"][way]
        print(f"{way:10} {milliseconds:10.3f} ms {speed:10.2f} GB/s {ratio:6.2f} of raw's time")


def main() -> None:
    """Measure, or be the other process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="also write the JSON here")
    parser.add_argument("--context", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.context is not None:
        asyncio.run(Context(Shape(**json.loads(args.context))).run())
        return
    shape = Shape(
        device=args.device,
        tokens=args.tokens,
        chunk_tokens=args.chunk_tokens,
        layers=args.layers,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        token=secrets.token_hex(16),
    )
    result = asyncio.run(measure(shape, args.rounds))
    show(result)
    finish({"benchmark": "transfer", **result}, args.out)


if __name__ == "__main__":
    main()
