"""Several ranks a side over the real UCX: agents of one process, then a process a rank, of which
one does wrong or is killed. Budget: 20 s.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from random import Random

import pytest

from kvcache_core.spec import ElementType, ReusePolicy
from tests.transfer.agent_rig import PATIENT
from tests.transfer.context_process import AT_HOME
from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.instance_rig import Cluster, instances
from tests.transfer.ucx_instances import Instance, InstanceRank, grant, instance
from transfer.ucx.transport import UcxTransport

pytestmark = pytest.mark.ucx
LAYERS = (Attention(4, head_dim=256), Attention(2, window=80, head_dim=256))
DRAFTS = (Attention(2, dtype=ElementType.BFLOAT16, policy=ReusePolicy.OPTIONAL),)
WHOLE = Side(stages=(2,), drafts=True)
CONTEXT_DEEDS = ("refuses", "quits", "strays", "halts")
GENERATION_DEEDS = ("refuses", "quits")


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


def wrongs(contexts: int, generations: int) -> list[str]:
    """Everything that each rank can do wrong."""
    return [
        *(f"context-{n}-{deed}" for n in range(contexts) for deed in CONTEXT_DEEDS),
        *(f"generation-{n}-{deed}" for n in range(generations) for deed in GENERATION_DEEDS),
    ]


def shuffled(names: list[str]) -> list[str]:
    Random(5).shuffle(names)
    return names


@dataclass
class Ferry:
    """Two instances between which requests go."""

    contexts: Instance
    generations: Instance

    @property
    def ranks(self) -> list[InstanceRank]:
        return [*self.contexts, *self.generations]

    def grant(self, names: list[str]) -> None:
        grant(self.contexts, self.generations, names)

    async def ended(self, names: list[str], survivors: list[InstanceRank]) -> None:
        await asyncio.gather(*(rank.ended(names) for rank in survivors))


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["tp 2->1", "tp 1->2"])
async def test_what_one_rank_does_wrong_ends_its_request_on_all_and_no_other(
    tp: tuple[int, int],
) -> None:
    """A process a rank. Then one of the two is killed, and another instance goes on."""
    wrong = [f"{number}-{deed}" for number, deed in enumerate(wrongs(*tp))]
    good = [str(number) for number in range(len(wrong), 22)]
    async with AsyncExitStack() as stack:
        contexts = await stack.enter_async_context(instance("context", tp))
        generations = await stack.enter_async_context(instance("generation", tp))
        pair = Ferry(contexts, generations)
        halting = [name for name in wrong if name.endswith("halts")]
        pair.grant(shuffled([*wrong, *good]))
        # All others end while these stand still, until one rank cancels them.
        await pair.ended([name for name in [*wrong, *good] if name not in halting], pair.ranks)
        for side in (contexts, generations):
            assert side.agreed.completed == set(good)
            assert not (side.agreed.failed | side.agreed.cancelled) & set(halting)
        for name in halting:
            generations[0].process.order(f"cancel {name}")
        await pair.ended(halting, pair.ranks)
        for side in (contexts, generations):
            assert side.agreed.completed == set(good)
            assert side.agreed.failed | side.agreed.cancelled == set(wrong)
        assert [await rank.home() for rank in pair.ranks] == [AT_HOME] * 3

        one, two, halts = (
            (generations, contexts, "context-1-halts")
            if len(contexts) == 2
            else (contexts, generations, "context-0-halts")
        )
        name = f"{two[0].address.incarnation.instance}-b"
        others = await stack.enter_async_context(instance(name, tp))
        other_pair = Ferry(others, one) if two is contexts else Ferry(one, others)
        held, before, after = [f"22-{halts}", f"23-{halts}"], ["24", "25", "26"], ["27", "28", "29"]
        pair.grant(held)
        other_pair.grant(before)
        await contexts[-1].halted(held)
        victim = two[1]
        victim.process.signal(signal.SIGKILL)
        other_pair.grant(after)
        survivors = [rank for rank in pair.ranks if rank is not victim]
        await pair.ended(held, survivors)
        await other_pair.ended([*before, *after], other_pair.ranks)
        assert not one.agreed.completed & set(held)
        for side in (one, others):
            assert side.agreed.completed >= {*before, *after}
        alive = [*survivors, *others]
        assert [await rank.home() for rank in alive] == [AT_HOME] * 4
        assert [await rank.process.finish() for rank in alive] == [0] * 4


@pytest.mark.parametrize("side", ["context", "generation"])
async def test_a_rank_whose_thread_of_transfers_dies_says_so_and_ends_all(side: str) -> None:
    held = ["0-context-0-halts", "1-context-0-halts"]
    async with (
        instance("context", (1, 1)) as contexts,
        instance("generation", (1, 1)) as generations,
    ):
        pair = Ferry(contexts, generations)
        pair.grant(held)
        await contexts[0].halted(held)
        broken, other = (
            (contexts[0], generations[0]) if side == "context" else (generations[0], contexts[0])
        )
        broken.process.order("break")
        await pair.ended(held, pair.ranks)
        for rank in pair.ranks:
            assert not rank.facts.completed
        broken.process.order("failure")
        assert "UCX driver thread died: SystemError" in await broken.line()
        other.process.order("failure")
        assert await other.line() == "failure"
        assert await other.home() == AT_HOME
        assert await other.process.finish() == 0
