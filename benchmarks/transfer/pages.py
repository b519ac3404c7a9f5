"""What both roles have in common: one rank's pools, its agents, and events that can be awaited."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from typing_extensions import override

from benchmarks.transfer.cases import Model, Shape, Slots
from benchmarks.transfer.content import Content
from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import AgentEvent, SessionEnded
from transfer.identity import Incarnation
from transfer.lease import TransferLease, views_of_groups
from transfer.outcome import Outcome
from transfer.page_table import page_table_of
from transfer.rank_info import EngineFacts, ParallelShape, RankInfo
from transfer.ucx.transport import UcxTransport
from worker.page_memory import StoragePages

HOST: Final = "127.0.0.1"
MOST_COPY_BYTES: Final = 256 << 20
"""Of one copy: far beyond the processor's caches that one core fills."""
FACTS: Final = EngineFacts(
    model="none", model_hash="none", rope=(), kv_dtype="bfloat16", attention="grouped"
)


@dataclass(frozen=True)
class RankSpec:
    """What the process of one rank is told on its command line."""

    role: str
    rank: int
    shape: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    device: str
    pool_blocks: int
    token: str
    nonce: str

    @property
    def model(self) -> Model:
        """The whole model."""
        return Model(self.layers, self.kv_heads, self.head_dim, self.tokens_per_block)

    @property
    def tp(self) -> int:
        """Ranks of this rank's instance."""
        shape = Shape.parse(self.shape)
        return shape.context if self.role == "context" else shape.generation


class Lease(TransferLease):
    """Pages that nobody else wants."""

    def __init__(self, first_block: int, slots: Slots) -> None:
        self.first_block = first_block
        self.end_block = first_block + len(slots)
        self._slots = slots

    @override
    def slots(self, view: int) -> Slots:
        return self._slots

    @override
    def release(self) -> None:
        """Nothing to give back."""

    @override
    def quarantine(self) -> None:
        """Nothing to keep."""


class Events:
    """Events of an agent, awaited by kind and request. A request that fails fails its waiters."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[type, str], asyncio.Future[Any]] = {}

    def expect(self, kind: type, name: str) -> asyncio.Future[Any]:
        """The next event of this kind for this request."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[kind, name] = future
        return future

    def tell(self, event: AgentEvent) -> None:
        """What the agent delivers."""
        if isinstance(event, SessionEnded) and event.outcome is not Outcome.SUCCEEDED:
            self._fail(event)
            return
        waiting = self._waiting.pop((type(event), event.request_id), None)
        if waiting is not None:
            waiting.set_result(event)

    def _fail(self, event: SessionEnded) -> None:
        for key in [key for key in self._waiting if key[1] == event.request_id]:
            self._waiting.pop(key).set_exception(
                RuntimeError(f"{event.request_id}: {event.outcome.value}, {event.reason}")
            )


class RankPages:
    """Pools of one rank, and what its agents are made of."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec: Final = spec
        self._plan = spec.model.plan(spec.tp)
        storage = TorchStorage(self._plan, [spec.pool_blocks], spec.device)
        self._storage = storage
        self.events: Final = Events()
        self._device = storage.pool_bytes(0, 0).device
        self._memory = StoragePages(storage)
        self._copies = self._copy_buffers()

    def transport(self) -> UcxTransport:
        """A transport for this rank's memory."""
        return UcxTransport(HOST, cuda_device=self._device.index)

    def content(self, tokens_per_page: int | None) -> Content:
        """What is in the pools, read with pages of so many tokens; None: of whole blocks."""
        first_head = self.spec.rank * (self.spec.kv_heads // self.spec.tp)
        plan = self.spec.model.plan(self.spec.tp, tokens_per_page)
        return Content(self.spec.model, plan, self._storage, first_head)

    def agent(self, name: str, tokens_per_page: int | None) -> TransferAgent:
        """An agent over the pools, which calls its instance ``name``."""
        plan = self.spec.model.plan(self.spec.tp, tokens_per_page)
        return TransferAgent(
            rank_info=self._rank_info(name, plan, self.spec.rank),
            instance=[self._rank_info(name, plan, rank) for rank in range(self.spec.tp)],
            views=views_of_groups(plan),
            transport=self.transport(),
            memory=self._memory,
            config=AgentConfig(host=HOST, cluster_token=self.spec.token, costs=self._memory.costs),
            deliver=self.events.tell,
        )

    def share(self, slots: Slots, part: int, parts: int) -> object:
        """Memory of one of ``parts`` equal parts of neighbouring slots."""
        whole: Any = self._memory.region(0, 0, int(slots[0]), len(slots))
        size = len(whole) // parts
        return whole[part * size : (part + 1) * size]

    def copy_gb_s(self) -> float:
        """One copy within this rank's memory."""
        source, target = self._copies
        start = time.perf_counter()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        return len(target) / (time.perf_counter() - start) / 1e9

    def _copy_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = min(MOST_COPY_BYTES, self.spec.pool_blocks * self._plan.pool_groups[0].slot_bytes[0])
        source = torch.ones(size, dtype=torch.uint8, device=self._device)
        return source, torch.zeros_like(source)

    def _rank_info(self, name: str, plan: LayoutPlan, rank: int) -> RankInfo:
        shape = ParallelShape(tp_size=self.spec.tp, tp_rank=rank)
        return RankInfo(
            incarnation=Incarnation(instance=name, nonce=self.spec.nonce),
            rank=rank,
            shape=shape,
            layers_per_stage=(self.spec.layers,),
            tokens_per_block=plan.tokens_per_block,
            engine=FACTS,
            page_table=page_table_of(plan, shape),
            data_host="",
            data_port=0,
        )
