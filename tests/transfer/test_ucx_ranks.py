"""Several ranks a side over the real UCX, one driver thread a rank. Budget: 10 s."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvcache_core.spec import ElementType, ReusePolicy
from tests.transfer.agent_rig import PATIENT
from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.instance_rig import Cluster, instances
from transfer.ucx.transport import UcxTransport

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
    cluster = Cluster(timing=PATIENT, transport=lambda _name: UcxTransport("127.0.0.1"))
    async with instances(pair, random, 3000, cluster) as both:
        await both.run(random)
        for node in both.nodes:
            assert node.agent.counters.bytes_total > 1 << 20
            assert set(node.agent.lanes.values()) == {"shm"}
