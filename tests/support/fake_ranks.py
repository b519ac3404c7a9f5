"""Ranks of a fake worker that have requests of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from transfer.identity import Incarnation, PeerAddress, RankPort
from worker.messages import LegPlaced


@dataclass
class FakeRanks:
    """How many there are; context legs live on the last of them."""

    size: int = 1
    gate: asyncio.Event | None = None
    """When set, context legs are placed once it is."""

    def peer(self, incarnation: Incarnation) -> PeerAddress:
        """Where they are to be found."""
        followers = tuple(
            RankPort(host="127.0.0.1", control_port=1 + rank) for rank in range(1, self.size)
        )
        return PeerAddress(
            incarnation=incarnation, host="127.0.0.1", control_port=1, followers=followers
        )

    async def place(self, request_id: str) -> tuple[LegPlaced, ...]:
        """What is told of a context leg before anything else; nothing by a single rank."""
        if self.gate is not None:
            await self.gate.wait()
        if self.size == 1:
            return ()
        return (LegPlaced(request_id=request_id, rank=self.size - 1),)
