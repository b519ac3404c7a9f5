"""Random deeds at random moments of requests over several ranks: all ends once, pages go home."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest

from tests.transfer.geometries import Attention, Recurrent, Side, same_model
from tests.transfer.instance_rig import REQUEST, Cluster, Instances, RankNode, instances
from transfer.agent_events import AnnounceReceived, GrantReceived, LeaseEnded, SessionEnded
from transfer.outcome import Outcome

LAYERS = (Attention(2), Attention(1, window=17), Recurrent(2))
SIDES = (
    Side(stages=(3,)),
    Side(tp=2, stages=(3,)),
    Side(stages=(1, 2)),
    Side(tp=2, dp=2, stages=(2, 1)),
    Side(stages=(3,), cp=2),
)
PROMPT = 37
SEEDS = 40
DEADLINE_MS = 1_000


async def cancel(node: RankNode) -> None:
    node.agent.cancel(REQUEST, "gone")


async def kill(node: RankNode) -> None:
    node.kill()


async def close(node: RankNode) -> None:
    await node.agent.close()


async def nothing(_node: RankNode) -> None:
    """The request is left alone."""


DEEDS = (cancel, cancel, cancel, kill, close, nothing)


async def serve_context(both: Instances, node: RankNode, random: Random) -> None:
    """One context rank's engine."""
    await node.engine.expect(GrantReceived, REQUEST)
    node.agent.announce(REQUEST)
    cuts = sorted([0, random.randint(0, both.end_block), both.end_block])
    for start, end in pairwise(cuts):
        await turns(random)
        node.agent.ship(REQUEST, start, end, node.lease(start, end))
    node.hand_off()


async def serve_generation(both: Instances, node: RankNode, random: Random) -> None:
    """One generation rank's engine. A rank that is cancelled before it grants tells nobody: the
    others' deadline ends the request.
    """
    await turns(random)
    both.grant([node], deadline_ms=DEADLINE_MS)
    await node.engine.expect(AnnounceReceived, REQUEST)
    await turns(random)
    node.agent.ready(REQUEST, 0, both.end_block, node.lease(0, both.end_block))


async def turns(random: Random) -> None:
    for _ in range(random.randint(0, 20)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_all_ranks_end_once_and_all_pages_go_home(seed: int) -> None:
    random = Random(seed)
    pair = same_model(random.choice(SIDES), random.choice(SIDES), LAYERS)
    async with instances(pair, random, PROMPT, Cluster()) as both:
        engines = [
            asyncio.ensure_future(serve(both, node, Random(random.random())))
            for serve, nodes in (
                (serve_context, both.contexts),
                (serve_generation, both.generations),
            )
            for node in nodes
        ]
        for _ in range(random.randint(0, 150)):
            await asyncio.sleep(0)
        deed, victim = random.choice(DEEDS), random.choice(both.nodes)
        await deed(victim)
        # A rank that was not granted yet never hears of the request; all others end.
        for node in both.generations:
            await node.engine.expect(SessionEnded, REQUEST)
        for engine in engines:
            engine.cancel()
        await asyncio.gather(*engines, return_exceptions=True)
        for node in both.nodes:
            if node.killed:
                continue
            if node.engine.of(GrantReceived, REQUEST):
                await node.engine.expect(SessionEnded, REQUEST)
            assert len(node.engine.of(SessionEnded, REQUEST)) <= 1
            await node.leases_over()
            assert len(node.engine.of(LeaseEnded, REQUEST)) == len(node.leases)
        ends = {node.engine.of(SessionEnded, REQUEST)[0].outcome for node in both.generations}
        if deed is nothing:
            assert ends == {Outcome.SUCCEEDED}
            for node in both.generations:
                both.check_bytes(node)
