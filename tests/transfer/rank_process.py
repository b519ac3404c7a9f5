"""One context rank of an instance of two, in a process of its own over UCX.

``main`` takes the instance's nonce and the rank's number; it prints its address, then serves every
grant at once, in chunks with pauses in which the loop goes on, until its stdin is closed.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random

from tests.transfer.agent_rig import PATIENT
from tests.transfer.filled_pools import FilledPools
from tests.transfer.geometries import Attention, Geometry, Side, same_model
from tests.transfer.instance_rig import REQUEST, Cluster, numbered, rank_node
from transfer.agent_events import GrantReceived, SessionEnded
from transfer.identity import Incarnation
from transfer.ucx.transport import UcxTransport

PROMPT = 2048
TOKENS_PER_BLOCK = 64
CHUNK_BLOCKS = 4
PAUSE_S = 0.05


def halves_to_whole() -> Geometry:
    """Tensor parallel 2 to 1; a chunk is 2 MiB a rank."""
    layers = (Attention(4, head_dim=512), Attention(4, head_dim=512))
    sides = Side(tp=2, stages=(2,)), Side(stages=(2,))
    return same_model(*sides, layers, tokens_per_block=TOKENS_PER_BLOCK)


def ucx_cluster() -> Cluster:
    """Agents over UCX."""
    return Cluster(timing=PATIENT, transport=lambda _name: UcxTransport("127.0.0.1"))


async def serve(nonce: str, rank: int) -> None:
    (instance,) = numbered(halves_to_whole(), Incarnation(instance="context", nonce=nonce))
    pools = FilledPools(instance[rank], PROMPT, Random(rank))
    pools.fill()
    node = rank_node(instance[rank], instance, pools, ucx_cluster())
    node.address = await node.agent.start()
    print(node.address.model_dump_json(), flush=True)
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.engine.expect(GrantReceived, REQUEST)
    node.agent.announce(REQUEST)
    for start in range(0, PROMPT // TOKENS_PER_BLOCK, CHUNK_BLOCKS):
        end = start + CHUNK_BLOCKS
        node.agent.ship(REQUEST, start, end, node.lease(start, end))
        await asyncio.sleep(PAUSE_S)
    node.hand_off()
    ended = await node.engine.expect(SessionEnded, REQUEST)
    await node.leases_over()
    print(ended.outcome.value, flush=True)
    await stop
    await node.agent.close()


def main(nonce: str, rank: str) -> None:
    """Run until stdin is closed."""
    asyncio.run(serve(nonce, int(rank)))
