"""Instances of ranks in processes of their own, and what each rank says of its requests."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.support.forked import WAIT_S, Forked, forked
from tests.transfer.context_process import AT_HOME, RankState
from tests.transfer.rank_process import Order, RankFacts
from tests.transfer.rank_process import main as rank_main
from transfer.consensus import TransferFacts, agree
from transfer.identity import Incarnation, PeerAddress
from transfer.outcome import Outcome


class InstanceRank:
    """One rank."""

    def __init__(self, process: Forked, address: PeerAddress) -> None:
        self.process = process
        self.address = address
        self.ends: dict[str, list[str]] = defaultdict(list)
        """What it said of each request that has ended."""

    async def line(self) -> str:
        """Its next line; ends are kept."""
        line = await self.process.line()
        assert line, f"{self.address.rank_id} has ended"
        if line.startswith("ended "):
            self.ends[line.split()[1]].append(line)
        return line

    async def ended(self, names: Sequence[str]) -> None:
        """Wait until all of these have."""
        while not self.ends.keys() >= set(names):
            await self.line()

    async def halted(self, names: Sequence[str]) -> None:
        """Wait until it stands still in all of these."""
        left = {f"halted {name}" for name in names}
        while left:
            left.discard(await self.line())

    async def home(self) -> RankState:
        """What it says once nothing runs and no lease is out, or after a while."""
        loop = asyncio.get_running_loop()
        end = loop.time() + WAIT_S
        while (state := await self._state()) != AT_HOME and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return state

    async def _state(self) -> RankState:
        self.process.order("state")
        while not (line := await self.line()).startswith("{"):
            pass
        return RankState(**json.loads(line))

    @property
    def facts(self) -> TransferFacts:
        """What it would tell the other ranks of its instance."""
        by_outcome: dict[str, set[str]] = {outcome.value: set() for outcome in Outcome}
        for name, lines in self.ends.items():
            (line,) = lines
            by_outcome[line.split()[2]].add(name)
        return TransferFacts(
            completed=frozenset(by_outcome["succeeded"]),
            failed=frozenset(by_outcome["failed"]),
            cancelled=frozenset(by_outcome["cancelled"]),
        )


class Instance(list[InstanceRank]):
    """All ranks of one."""

    @property
    def agreed(self) -> TransferFacts:
        """What its ranks agree on."""
        return agree([rank.facts for rank in self])

    async def ended(self, names: Sequence[str]) -> None:
        """Wait until every rank has told the end of all of these."""
        await asyncio.gather(*(rank.ended(names) for rank in self))


@asynccontextmanager
async def instance(name: str, tp: tuple[int, int]) -> AsyncIterator[Instance]:
    """An instance whose name begins with ``context`` or ``generation``, of a sender and a receiver
    of these tensor parallel sizes.
    """
    incarnation = Incarnation.mint(name)
    count = tp[0] if name.startswith("context") else tp[1]
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                forked(
                    rank_main,
                    RankFacts(tp=tp, incarnation=incarnation, rank=rank).model_dump_json(),
                )
            )
            for rank in range(count)
        ]
        yield Instance(
            [
                InstanceRank(process, PeerAddress.model_validate_json(await process.line()))
                for process in processes
            ]
        )


def grant(contexts: Instance, generations: Instance, names: Sequence[str]) -> None:
    """All ranks of the one grant these requests to the other."""
    sources = tuple(rank.address for rank in contexts)
    order = Order(names=tuple(names), sources=sources).model_dump_json()
    for rank in generations:
        rank.process.order(f"grant {order}")
