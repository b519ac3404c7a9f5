"""The process of one generation rank: asks, takes the time, and checks what came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.transfer.cases import Slots, context_slots, generation_slots
from benchmarks.transfer.pages import HOST, Lease, RankPages, RankSpec
from benchmarks.transfer.raw import RawReceiver
from transfer.agent_events import AnnounceReceived, HandoffReceived, LeaseEnded, SessionEnded
from transfer.identity import PeerAddress
from transfer.transport import main_lane

DEADLINE_MS: Final = 300_000


class GenerationRank:
    """An agent a size of kernel pages over one memory, and a raw endpoint to each context rank."""

    def __init__(self, spec: RankSpec) -> None:
        self._pages = RankPages(spec)
        self._tokens_per_page = {"default": None, "staged": spec.model.small_page}
        self._agents = {
            layout: self._pages.agent(f"generation {layout}", tokens_per_page)
            for layout, tokens_per_page in self._tokens_per_page.items()
        }
        self._contents = {
            layout: self._pages.content(tokens_per_page)
            for layout, tokens_per_page in self._tokens_per_page.items()
        }
        self._raw = self._pages.transport()
        self._receivers: list[RawReceiver] = []
        self._sources: list[PeerAddress] = []
        self._granted: dict[str, Slots] = {}

    async def start(self) -> dict[str, Any]:
        """Listen."""
        await self._raw.start()
        for agent in self._agents.values():
            await agent.start()
        return {}

    async def dial(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Connect to every context rank, with agent and raw endpoint; lanes in use."""
        self._sources = [
            PeerAddress.model_validate(source, strict=False) for source in told["sources"]
        ]
        for agent in self._agents.values():
            for source in self._sources:
                await agent.warm(source)
        self._receivers = [await RawReceiver.dial(self._raw, HOST, one) for one in told["raw"]]
        lanes = {main_lane(receiver.lanes) for receiver in self._receivers}
        return {
            "lanes": sorted(
                lanes | {lane for agent in self._agents.values() for lane in agent.lanes.values()}
            )
        }

    async def raw(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """One message a stream from every context rank, all at once."""
        blocks, parts = told["blocks"], len(self._receivers)
        slots = [self._sources_of(blocks, stream) for stream in range(told["streams"])]
        start = time.perf_counter()
        await asyncio.gather(
            *(
                receiver.fetch(blocks, [self._pages.share(run, part, parts) for run in slots])
                for part, receiver in enumerate(self._receivers)
            )
        )
        return {"start": start, "end": time.perf_counter()}

    async def grant(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Grant requests; answers when all are announced."""
        agent, announced = self._agents[layout_of(told["way"])], []
        for name, slots in zip(told["names"], self._slots(told), strict=True):
            announced.append(self._pages.events.expect(AnnounceReceived, name))
            self._granted[name] = slots
            tokens = told["blocks"] * self._pages.spec.tokens_per_block
            agent.grant(name, self._sources, tokens, DEADLINE_MS)
        await asyncio.gather(*announced)
        return {}

    async def fetch(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Give the pages of what was granted; answers when all of it has arrived."""
        granted, self._granted = self._granted, {}
        expect = self._pages.events.expect
        handed = [expect(HandoffReceived, name) for name in granted]
        over = [expect(kind, name) for kind in (LeaseEnded, SessionEnded) for name in granted]
        agent = self._agents[layout_of(told["way"])]
        before, staged = agent.counters.bytes_total, agent.counters.staged_bytes_total
        start = time.perf_counter()
        for name, slots in granted.items():
            agent.ready(name, 0, len(slots), Lease(0, slots))
        await asyncio.gather(*handed)
        end = time.perf_counter()
        await asyncio.gather(*over)
        return {
            "start": start,
            "end": end,
            "bytes": agent.counters.bytes_total - before,
            "staged_bytes": agent.counters.staged_bytes_total - staged,
        }

    async def copy(self, _told: Mapping[str, Any]) -> dict[str, Any]:
        """Speed of one copy."""
        return {"gb_s": await asyncio.to_thread(self._pages.copy_gb_s)}

    async def erase(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Zero the slots of requests."""
        content = self._contents[layout_of(told["way"])]
        for slots in self._slots(told):
            await asyncio.to_thread(content.erase, slots)
        return {}

    async def check(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Compare every byte of requests. Raises RuntimeError."""
        content = self._contents[layout_of(told["way"])]
        for stream, slots in enumerate(self._slots(told)):
            sources = self._sources_of(told["blocks"], stream)
            await asyncio.to_thread(content.check, slots, sources)
        return {}

    async def close(self) -> None:
        """End agent and transport."""
        for receiver in self._receivers:
            await receiver.end()
        for agent in self._agents.values():
            await agent.close()
        await self._raw.close()

    def _sources_of(self, blocks: int, stream: int) -> Slots:
        return context_slots(self._pages.spec.pool_blocks, blocks, stream)

    def _slots(self, told: Mapping[str, Any]) -> Sequence[Slots]:
        pool_blocks = self._pages.spec.pool_blocks
        return [
            generation_slots(pool_blocks, self._sources_of(told["blocks"], stream), told["way"])
            for stream in range(len(told["names"]))
        ]


def layout_of(way: str) -> str:
    """Which agent moves pages in this way."""
    return "staged" if way == "staged" else "default"
