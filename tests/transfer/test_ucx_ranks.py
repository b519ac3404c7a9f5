"""Several ranks a side over the real UCX: agents of one process, then a process a rank, of which
one is killed. Budget: 20 s.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from kvcache_core.spec import ElementType, ReusePolicy
from tests.support.forked import forked
from tests.transfer.filled_pools import FilledPools
from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.instance_rig import (
    REQUEST,
    RankNode,
    instances,
    numbered,
    rank_node,
)
from tests.transfer.rank_process import PROMPT, TOKENS_PER_BLOCK, halves_to_whole, ucx_cluster
from tests.transfer.rank_process import main as rank_main
from tests.transfer.ucx_contexts import RankProcess
from transfer.agent_events import AnnounceReceived, ChunkReceived, LeaseInDoubt, SessionEnded
from transfer.identity import Incarnation, PeerAddress
from transfer.outcome import Outcome

pytestmark = pytest.mark.ucx
LAYERS = (Attention(4, head_dim=256), Attention(2, window=80, head_dim=256))
DRAFTS = (Attention(2, dtype=ElementType.BFLOAT16, policy=ReusePolicy.OPTIONAL),)
WHOLE = Side(stages=(2,), drafts=True)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        pytest.param(replace(WHOLE, tp=2), WHOLE, id="tp 2->1"),
        pytest.param(WHOLE, replace(WHOLE, tp=2), id="tp 1->2"),
    ],
)
async def test_every_byte_of_every_receiver_arrives(sender: Side, receiver: Side) -> None:
    pair = same_model(sender, receiver, LAYERS, DRAFTS, tokens_per_block=64)
    random = Random(2)
    async with instances(pair, random, 3000, ucx_cluster()) as both:
        await both.run(random)
        for node in both.nodes:
            assert node.agent.counters.bytes_total > 1 << 20
            assert set(node.agent.lanes.values()) == {"shm"}


@asynccontextmanager
async def context_instance() -> AsyncIterator[list[RankProcess]]:
    """Both ranks of a context instance, each in a process of its own."""
    nonce = Incarnation.mint("context").nonce
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(forked(rank_main, nonce, str(rank)))
            for rank in range(2)
        ]
        yield [
            RankProcess(process, PeerAddress.model_validate_json(await process.line()))
            for process in processes
        ]


@asynccontextmanager
async def generation_rank() -> AsyncIterator[RankNode]:
    """The generation instance's only rank, in this process."""
    (instance,) = numbered(halves_to_whole(), Incarnation.mint("generation"))
    pools = FilledPools(instance[0], PROMPT, Random(7))
    node = rank_node(instance[0], instance, pools, ucx_cluster())
    node.address = await node.agent.start()
    try:
        yield node
    finally:
        await node.agent.close()


async def start(node: RankNode, contexts: list[RankProcess]) -> None:
    """Up to the pages."""
    sources = [context.address for context in contexts]
    node.agent.grant(REQUEST, sources, PROMPT, 20_000)
    await node.engine.expect(AnnounceReceived, REQUEST)
    end_block = PROMPT // TOKENS_PER_BLOCK
    node.agent.ready(REQUEST, 0, end_block, node.lease(0, end_block))


async def test_one_of_two_sending_processes_is_killed_and_another_instance_serves() -> None:
    async with context_instance() as contexts, generation_rank() as node:
        await start(node, contexts)
        await node.engine.expect(ChunkReceived, REQUEST)
        contexts[1].signal(signal.SIGKILL)
        end = await node.engine.expect(SessionEnded, REQUEST)
        assert end.outcome is Outcome.FAILED
        await node.leases_over()
        # The other rank is told, gets its pages back and ends well.
        assert await contexts[0].line() in ("failed", "cancelled")
        assert await contexts[0].finish() == 0
        assert not node.engine.of(LeaseInDoubt, REQUEST)
    async with context_instance() as contexts, generation_rank() as node:
        await start(node, contexts)
        end = await node.engine.expect(SessionEnded, REQUEST)
        assert end.outcome is Outcome.SUCCEEDED
        await node.leases_over()
        assert [await context.line() for context in contexts] == ["succeeded", "succeeded"]
        for held in node.pools.buffers():
            assert (held.data(node.pools.pools)[held.slots] == held.values()).all()
        assert [await context.finish() for context in contexts] == [0, 0]
