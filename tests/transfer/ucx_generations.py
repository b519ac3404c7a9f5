"""Generation ranks in processes of their own; context ranks there or here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from tests.support.forked import WAIT_S, forked
from tests.transfer.context_process import AT_HOME, ContextFacts, ContextRank, RankState
from tests.transfer.generation_process import GenerationFacts
from tests.transfer.generation_process import main as generation_main
from tests.transfer.ucx_contexts import RankProcess
from transfer.identity import PeerAddress


@asynccontextmanager
async def generation_process(facts: GenerationFacts) -> AsyncIterator[RankProcess]:
    """A generation rank in a process of its own."""
    async with forked(generation_main, facts.text()) as process:
        yield RankProcess(process, PeerAddress.model_validate_json(await process.line()))


class Ends(list[str]):
    """What a rank in this process said of its sessions."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self._came.set()

    async def of(self, request_id: str) -> str:
        """The end of this request, once it has come; its only one so far."""
        async with asyncio.timeout(WAIT_S):
            while not self._found(request_id):
                self._came.clear()
                await self._came.wait()
        (line,) = self._found(request_id)
        return line

    def _found(self, request_id: str) -> list[str]:
        return [line for line in self if line.startswith(f"ended {request_id} ")]


class HoldingRank(ContextRank):
    """Announces, and ships when it is told to."""

    @override
    def serve(self, request_id: str) -> None:
        self.agent.announce(request_id)


@asynccontextmanager
async def context_here(
    facts: ContextFacts, kind: type[ContextRank] = ContextRank
) -> AsyncIterator[tuple[ContextRank, PeerAddress, Ends]]:
    """A context rank in this process."""
    ends = Ends()
    rank = kind(facts, ends)
    address = await rank.agent.start()
    try:
        yield rank, address, ends
    finally:
        await rank.agent.close()


async def all_home(rank: ContextRank) -> RankState:
    """The state of a rank here once nothing runs and no lease is out, or after a while."""
    end = asyncio.get_running_loop().time() + WAIT_S
    while rank.state != AT_HOME and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return rank.state
