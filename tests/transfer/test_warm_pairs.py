"""Pairs wanted ahead of requests: there before the first, again after a loss, and accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.transfer.agent_rig import WAIT_S, Node, NodeFacts, Transfer
from tests.transfer.peer_world import World
from transfer.agent_events import SessionEnded
from transfer.agent_figures import PairState
from transfer.agent_pair import Side


class Watched:
    """A generation rank and whoever waits for a change of its pairs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._changed = asyncio.Event()
        node.agent.watch_pairs(self._changed.set)

    @property
    def dialled(self) -> tuple[PairState, ...]:
        pairs = self.node.agent.figures.pairs
        return tuple(pair for pair in pairs if pair.side is Side.GENERATION)

    async def until(self, condition: Callable[[tuple[PairState, ...]], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self.dialled):
                self._changed.clear()
                await self._changed.wait()


class Warm(World):
    """A generation rank that keeps warm what tests start."""

    async def generation(self) -> Watched:
        return Watched(await self.node("generation"))


@pytest.fixture
async def warm() -> AsyncIterator[Warm]:
    made = Warm()
    yield made
    await made.close()


def connected(*nodes: Node) -> tuple[PairState, ...]:
    return tuple(PairState(Side.GENERATION, node.info.rank_id, "self", "") for node in nodes)


async def test_the_first_request_dials_nothing(warm: Warm) -> None:
    contexts = [await warm.node("a"), await warm.node("b")]
    wires = [await warm.wire(node) for node in contexts]
    generation = await warm.generation()
    agent = generation.node.agent
    agent.keep_warm([node.address for node in contexts])
    await generation.until(lambda pairs: set(pairs) == set(connected(*contexts)))
    for number, context in enumerate(contexts):
        await Transfer(f"r{number}", [1], [2]).run(context, generation.node)
    assert [wire.connections for wire in wires] == [1, 1]
    figures = agent.figures
    assert figures.late_dials == 0
    assert figures.busy_bytes == agent.counters.bytes_total > 0
    seen = contexts[0].agent.figures.pairs
    assert seen == (PairState(Side.CONTEXT, generation.node.info.rank_id, "self", ""),)


async def test_a_request_that_has_to_wait_for_a_connection_is_counted(warm: Warm) -> None:
    context = await warm.node("a")
    generation = await warm.generation()
    await Transfer("r", [1], [2]).run(context, generation.node)
    await Transfer("s", [1], [2]).run(context, generation.node)
    assert generation.node.agent.figures.late_dials == 1


async def test_whoever_is_not_there_is_named_and_dialled_until_it_is(warm: Warm) -> None:
    here, late = await warm.node("a"), await warm.node("b")
    wire = await warm.wire(late)
    await wire.close()
    generation = await warm.generation()
    generation.node.agent.keep_warm([here.address, late.address])
    port = late.address.control_port
    await generation.until(lambda pairs: any(f":{port}: " in pair.reason for pair in pairs))
    await generation.until(lambda pairs: connected(here)[0] in pairs)
    await wire.start(port)
    await generation.until(lambda pairs: set(pairs) == set(connected(here, late)))


async def test_who_is_not_wanted_any_more_is_not_dialled(warm: Warm) -> None:
    here, absent = await warm.node("a"), await warm.node("b")
    wire = await warm.wire(absent)
    await wire.close()
    generation = await warm.generation()
    generation.node.agent.keep_warm([here.address, absent.address])
    await generation.until(lambda pairs: len(pairs) == 2 and connected(here)[0] in pairs)
    generation.node.agent.keep_warm([here.address])
    await generation.until(lambda pairs: pairs == connected(here))


async def test_a_lost_pair_is_dialled_again(warm: Warm) -> None:
    context = await warm.node("a")
    wire = await warm.wire(context)
    generation = await warm.generation()
    generation.node.agent.keep_warm([context.address])
    await generation.until(lambda pairs: pairs == connected(context))
    wire.cut()
    await generation.until(lambda pairs: pairs != connected(context))
    await generation.until(lambda pairs: pairs == connected(context))
    assert wire.connections == 2


async def test_a_peer_that_does_not_fit_is_named_and_not_asked_again(warm: Warm) -> None:
    context = await warm.node("a", NodeFacts(tokens_per_block=32))
    wire = await warm.wire(context)
    generation = await warm.generation()
    before = generation.node.agent.refusals
    generation.node.agent.keep_warm([context.address])
    await generation.until(lambda pairs: any("tokens_per_block" in p.reason for p in pairs))
    # The engine's thread may still be reading what it got.
    assert before == {}
    ((rank, reasons),) = generation.node.agent.refusals.items()
    assert rank == str(context.info.rank_id)
    assert "tokens_per_block" in reasons[0]
    assert wire.connections == 1


async def test_a_dial_that_breaks_is_named_and_a_later_request_still_ends(warm: Warm) -> None:
    context, generation = await warm.node("a"), await warm.generation()
    nowhere = context.address.model_copy(update={"control_port": 1 << 16})
    generation.node.agent.keep_warm([nowhere])
    await generation.until(lambda pairs: any("OverflowError" in pair.reason for pair in pairs))
    generation.node.agent.grant("r", (nowhere,), 10, 20_000)
    end = await generation.node.engine.expect(SessionEnded, "r")
    assert "OverflowError" in end.reason


async def test_dialling_ends_when_all_tasks_of_the_loop_are_cancelled(warm: Warm) -> None:
    context, generation = await warm.node("a"), await warm.generation()
    wire = await warm.wire(context)
    wire.stop_flow()
    before = asyncio.all_tasks()
    generation.node.agent.keep_warm([context.address])
    while not wire.connections:  # noqa: ASYNC110
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - before
    (waiting,) = (task for task in tasks if task.get_name().startswith("warm-"))
    for task in tasks - {waiting}:
        task.cancel()
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=WAIT_S)
    assert waiting.cancelled()
