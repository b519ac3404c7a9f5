"""The process of one context rank: serves each grant as it was told to, and raw messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.transfer.cases import Slots, context_slots
from benchmarks.transfer.pages import Lease, RankPages, RankSpec
from benchmarks.transfer.prefill import ChunkedPrefill, PrefillLoad
from benchmarks.transfer.raw import RawSender
from transfer.agent_events import GrantReceived, SessionEnded
from transfer.messages import ChoiceHandoff, HandoffData

HANDOFF: Final = HandoffData(choices=(ChoiceHandoff(token=1),), cached_tokens=0)


class ContextRank:
    """One agent, and a raw endpoint for each generation rank."""

    def __init__(self, spec: RankSpec) -> None:
        self._pages = RankPages(spec)
        self._agent = self._pages.agent("context", None)
        self._raw = self._pages.transport()
        self._senders: list[RawSender] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._requests: list[asyncio.Task[float]] = []
        self._load: PrefillLoad | None = None

    async def start(self) -> dict[str, Any]:
        """Fill the pools and listen; where this rank's agent is."""
        await asyncio.to_thread(self._pages.content(None).fill)
        await self._raw.start()
        return {"source": (await self._agent.start()).model_dump()}

    async def listen(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Await the raw endpoint of each generation rank."""
        self._senders = [await RawSender.expect(self._raw) for _ in range(told["receivers"])]
        for part, sender in enumerate(self._senders):
            self._serving.add(asyncio.create_task(self._serve(sender, part)))
        return {"addresses": [sender.address for sender in self._senders]}

    async def offer(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Take on requests, whose grants are still to come."""
        for stream, name in enumerate(told["names"]):
            granted = self._pages.events.expect(GrantReceived, name)
            ended = self._pages.events.expect(SessionEnded, name)
            slots = context_slots(self._pages.spec.pool_blocks, told["blocks"], stream)
            work = self._request(name, slots, told["chunks"], granted, ended)
            self._requests.append(asyncio.create_task(work))
        return {"staged_bytes": self._staged_bytes}

    async def settle(self, _told: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the requests that were offered."""
        done = await asyncio.gather(*self._requests)
        self._requests.clear()
        return {"staged_bytes": self._staged_bytes, "last_done": max(done)}

    async def load(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Start a prefill; its steps a second while nothing else runs."""
        self._load = PrefillLoad(self._pages.spec.device)
        await asyncio.sleep(told["calm_s"])
        return {"speed": self._load.restart_count()}

    async def speed(self, _told: Mapping[str, Any]) -> dict[str, Any]:
        """Steps a second of the prefill since it was last asked."""
        return {"speed": self._load.restart_count() if self._load is not None else 0.0}

    async def calm(self, _told: Mapping[str, Any]) -> dict[str, Any]:
        """Stop the prefill."""
        if self._load is not None:
            await asyncio.to_thread(self._load.stop)
            self._load = None
        return {}

    async def close(self) -> None:
        """End agents and transports."""
        await self._agent.close()
        await asyncio.gather(*self._serving)
        await self._raw.close()

    @property
    def _staged_bytes(self) -> int:
        return self._agent.counters.staged_bytes_total

    async def _serve(self, sender: RawSender, part: int) -> None:
        def regions(messages: int, blocks: int) -> Sequence[object]:
            pool_blocks = self._pages.spec.pool_blocks
            return [
                self._pages.share(
                    context_slots(pool_blocks, blocks, stream), part, len(self._senders)
                )
                for stream in range(messages)
            ]

        await sender.serve(regions)

    async def _request(
        self,
        name: str,
        slots: Slots,
        chunks: Sequence[tuple[int, float]],
        granted: asyncio.Future[GrantReceived],
        ended: asyncio.Future[SessionEnded],
    ) -> float:
        """Ship ``chunks``, each its end block and the seconds it takes; clock of the last one."""
        await granted
        agent = self._agent
        agent.announce(name)
        ends = [end for end, _ in chunks]
        starts = [0, *ends[:-1]]

        def finished(number: int) -> None:
            start, end = starts[number], ends[number]
            agent.ship(name, start, end, Lease(start, slots[start:end]))

        prefill = ChunkedPrefill(self._pages.spec.device, [took for _, took in chunks], finished)
        await asyncio.to_thread(prefill.join)
        if self._pages.spec.rank == 0:
            agent.hand_off(name, HANDOFF)
        else:
            agent.hand_off_pages(name)
        await ended
        return prefill.last_done
