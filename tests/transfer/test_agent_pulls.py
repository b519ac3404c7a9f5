"""Prefix pulls between agents over the in-process transport: bytes, answers, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from tests.transfer.agent_rig import (
    Lease,
    Node,
    NodeFacts,
    Transfer,
    fill,
    lease,
    same_blocks,
    start_node,
)
from tests.transfer.geometries import same_model
from tests.transfer.instance_rig import REQUEST, instances
from tests.transfer.test_agent_ranks import DRAFTS, NAMED
from transfer.agent_events import (
    HandoffReceived,
    LeaseEnded,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.inprocess import InProcessTransport, Network
from transfer.messages import HandoffData
from transfer.outcome import Outcome
from transfer.prefix import Prefix

BLOCK_BYTES = 4096 + 1024 + 2048
PREFIX = Prefix(b"scope", np.arange(64, dtype=np.int32))
NO_TOKENS = HandoffData(choices=(), cached_tokens=64)


@dataclass
class World:
    """Two workers; either may pull from the other."""

    network: Network
    left: Node
    right: Node


@pytest.fixture
async def world() -> AsyncIterator[World]:
    network = Network(piece_bytes=512)
    left = await start_node("left", network.transport("a"), NodeFacts(num_slots=256))
    right = await start_node("right", network.transport("b"), NodeFacts(num_slots=256))
    yield World(network, left, right)
    for node in (left, right):
        await node.agent.close()
        assert node.agent.counters.sessions_in_flight == 0
        assert node.agent.counters.leases_in_doubt == 0


@dataclass
class Pull:
    """A prefix of four blocks of which the puller holds the first."""

    name: str
    puller: Node
    source: Node
    source_slots: list[int] = field(default_factory=lambda: [20, 21, 7, 9])
    target_slots: list[int] = field(default_factory=lambda: [30, 31, 40])
    given: Lease | None = None
    served: Lease | None = None

    async def ask(self, deadline_ms: int = 20_000) -> None:
        fill(self.source.memory, self.source_slots, len(self.name))
        self.puller.agent.pull(self.name, (self.source.address,), PREFIX, 2, deadline_ms)
        event = await self.source.engine.expect(PullReceived, self.name)
        assert event.puller == self.puller.info.incarnation
        assert (event.prefix.scope, event.least_blocks) == (b"scope", 2)
        assert event.prefix.tokens.tolist() == list(range(64))

    async def serve(self) -> None:
        """The source answers at once with all that it has."""
        self.served = lease(0, self.source_slots)
        self.source.agent.found(self.name, 4)
        self.source.agent.ship(self.name, 0, 4, self.served)
        self.source.agent.hand_off(self.name, NO_TOKENS)
        found = await self.puller.engine.expect(PrefixFoundReceived, self.name)
        assert found.end_block == 4

    def give_pages(self) -> None:
        self.given = lease(1, self.target_slots)
        self.puller.agent.ready(self.name, 1, 4, self.given)

    async def run(self) -> None:
        await self.ask()
        await self.serve()
        self.give_pages()
        handoff = await self.puller.engine.expect(HandoffReceived, self.name)
        assert handoff.data == NO_TOKENS
        await self.ended(Outcome.SUCCEEDED)
        assert same_blocks(self.source, self.source_slots[1:], self.puller, self.target_slots)

    async def ended(self, *outcomes: Outcome) -> None:
        """Each side's one outcome, and every lease home."""
        for node in (self.puller, self.source):
            end = await node.engine.expect(SessionEnded, self.name)
            assert end.outcome in outcomes, end
        for node, given in ((self.puller, self.given), (self.source, self.served)):
            if given is not None:
                await node.engine.expect(LeaseEnded, self.name)
                assert (given.releases, given.quarantines) == (1, 0)


async def test_what_the_puller_lacks_arrives(world: World) -> None:
    pull = Pull("p", world.left, world.right)
    await pull.run()
    for node in (world.left, world.right):
        (end,) = node.engine.of(SessionEnded, "p")
        assert (end.transferred_bytes, end.transferred_blocks) == (3 * BLOCK_BYTES, 3)
        assert not node.agent.counters.failures


async def test_pages_of_another_size_are_staged() -> None:
    network = Network(piece_bytes=512)
    left = await start_node("left", network.transport("a"), NodeFacts(tokens_per_page=8))
    right = await start_node("right", network.transport("b"), NodeFacts(tokens_per_page=4))
    await Pull("p", left, right).run()
    for node in (left, right):
        await node.agent.close()


async def test_workers_pull_from_each_other_while_they_transfer(world: World) -> None:
    left, right = world.left, world.right
    await asyncio.gather(
        Pull("one", left, right).run(),
        Pull("three", right, left, [50, 51, 52, 60], [70, 71, 72]).run(),
        Transfer("transfer", [100, 101, 90], [110, 111, 112]).run(left, right),
        Transfer("another one", [120, 121], [130, 131]).run(right, left),
    )


async def test_a_declined_pull_is_no_failure(world: World) -> None:
    pull = Pull("p", world.left, world.right)
    await pull.ask()
    world.right.agent.decline("p", "not here")
    await pull.ended(Outcome.SUCCEEDED)
    for node in (world.left, world.right):
        (end,) = node.engine.of(SessionEnded, "p")
        assert (end.reason, end.transferred_bytes) == ("declined: not here", 0)
        assert not node.agent.counters.failures
        assert not node.engine.of(HandoffReceived, "p")
    await Pull("next", world.left, world.right).run()


@pytest.mark.parametrize("stage", ["dialling", "asked", "served", "given"])
@pytest.mark.parametrize("who", ["puller", "source"])
async def test_cancel_at_every_stage_ends_both_sides(world: World, stage: str, who: str) -> None:
    pull = Pull("p", world.left, world.right)
    if stage == "dialling":
        world.left.agent.pull("p", (world.right.address,), PREFIX, 2, 20_000)
    else:
        await pull.ask()
    if stage in ("served", "given"):
        await pull.serve()
    if stage == "given":
        pull.give_pages()
    (world.left if who == "puller" else world.right).agent.cancel("p", "not wanted")
    if (stage, who) == ("dialling", "puller"):
        end = await world.left.engine.expect(SessionEnded, "p")
        assert end.outcome is Outcome.CANCELLED
    else:
        await pull.ended(Outcome.CANCELLED, Outcome.SUCCEEDED)
    await Pull("next", world.left, world.right).run()


async def test_an_answer_to_a_pull_that_is_over_comes_back(world: World) -> None:
    pull = Pull("p", world.left, world.right)
    await pull.ask()
    world.left.agent.cancel("p", "not wanted")
    await pull.ended(Outcome.CANCELLED)
    late = lease(0, pull.source_slots)
    world.right.agent.found("p", 4)
    world.right.agent.ship("p", 0, 4, late)
    world.right.agent.hand_off("p", NO_TOKENS)
    await world.right.engine.expect(LeaseEnded, "p")
    assert late.releases == 1
    assert not world.left.engine.of(PrefixFoundReceived, "p")


@pytest.mark.parametrize("stage", ["asked", "served", "given"])
@pytest.mark.parametrize("victim", ["puller", "source"])
async def test_a_peer_that_dies_ends_the_pull_and_frees_the_pages(
    world: World, stage: str, victim: str
) -> None:
    pull = Pull("p", world.left, world.right)
    await pull.ask()
    if stage in ("served", "given"):
        await pull.serve()
    if stage == "given":
        pull.give_pages()
    dead, alive = world.right, world.left
    given = pull.given
    if victim == "puller":
        dead, alive, given = alive, dead, pull.served
    assert isinstance(dead.transport, InProcessTransport)
    world.network.kill(dead.transport)
    await dead.agent.close()
    end = await alive.engine.expect(SessionEnded, "p")
    assert end.outcome is not Outcome.PENDING
    alive.agent.peer_known_dead(dead.info.incarnation)
    if given is not None:
        await alive.engine.expect(LeaseEnded, "p")
        assert given.releases == 1


async def test_a_source_that_does_not_answer_is_given_up_in_time(world: World) -> None:
    pull = Pull("p", world.left, world.right)
    await pull.ask(deadline_ms=200)
    end = await world.left.engine.expect(SessionEnded, "p")
    assert end.outcome is Outcome.FAILED
    assert "deadline" in end.reason
    await world.right.engine.expect(SessionEnded, "p")


async def test_nobody_there_fails_at_once(world: World) -> None:
    address = world.right.address
    await world.right.agent.close()
    world.left.agent.pull("p", (address,), PREFIX, 1, 20_000)
    end = await world.left.engine.expect(SessionEnded, "p")
    assert end.outcome is Outcome.FAILED
    assert world.left.agent.counters.failures == {"connect": 1}


async def test_nobody_pulls_from_itself(world: World) -> None:
    world.left.agent.pull("p", (world.left.address,), PREFIX, 1, 20_000)
    end = await world.left.engine.expect(SessionEnded, "p")
    assert end.outcome is Outcome.FAILED
    assert "itself" in end.reason


async def test_a_pull_does_not_join_a_transfer_of_its_id(world: World) -> None:
    left, right = world.left, world.right
    third = await start_node("third", world.network.transport("c"), NodeFacts(num_slots=64))
    pull = Pull("p", left, right)
    await pull.ask()
    third.agent.grant("p", (right.address,), 100, 20_000)
    end = await third.engine.expect(SessionEnded, "p")
    assert end.outcome is Outcome.CANCELLED
    await pull.serve()
    pull.give_pages()
    await pull.ended(Outcome.SUCCEEDED)
    await third.agent.close()


SEVERAL = ("tp 2->1", "tp 1->2", "pp 2->1", "cp 1->2", "states, tp 1->2", "dp of the receiver")


@pytest.mark.parametrize("name", SEVERAL)
async def test_every_byte_arrives_between_several_ranks(name: str) -> None:
    sender, receiver, layers = NAMED[name]
    pair = same_model(sender, receiver, layers, DRAFTS)
    random = Random(5)
    prompt_tokens = 4 * pair.tokens_per_block
    async with instances(pair, random, prompt_tokens) as both:
        prefix = Prefix(b"scope", np.zeros(prompt_tokens, dtype=np.int32))
        for node in both.generations:
            node.agent.pull(REQUEST, both.sources, prefix, 1, 20_000)
        for node in both.contexts:
            await node.engine.expect(PullReceived, REQUEST)
        for node in both.contexts:
            node.agent.found(REQUEST, both.end_block)
        both.ship(both.end_block)
        both.hand_off()
        for node in both.receiving():
            await node.engine.expect(PrefixFoundReceived, REQUEST)
        both.ready(random)
        await both.ended(Outcome.SUCCEEDED)
        for node in both.generations:
            assert len(node.engine.of(HandoffReceived, REQUEST)) == (node in both.receiving())
            both.check_bytes(node)


@pytest.mark.parametrize("declining", [0, 1])
async def test_ranks_of_a_source_that_disagree_fail_the_pull(declining: int) -> None:
    sender, receiver, layers = NAMED["tp 2->1"]
    pair = same_model(sender, receiver, layers, DRAFTS)
    prompt_tokens = 4 * pair.tokens_per_block
    async with instances(pair, Random(5), prompt_tokens) as both:
        prefix = Prefix(b"scope", np.zeros(prompt_tokens, dtype=np.int32))
        (puller,) = both.generations
        puller.agent.pull(REQUEST, both.sources, prefix, 1, 20_000)
        for place, node in enumerate(both.contexts):
            await node.engine.expect(PullReceived, REQUEST)
            if declining and place:
                node.agent.decline(REQUEST, "not here")
            else:
                node.agent.found(REQUEST, 3 + place)
        for node in both.nodes:
            await node.engine.expect(SessionEnded, REQUEST)
        (end,) = puller.engine.of(SessionEnded, REQUEST)
        assert end.outcome is Outcome.FAILED
        assert not puller.engine.of(PrefixFoundReceived, REQUEST)


async def test_a_source_that_does_not_fit_is_refused_with_the_reason(world: World) -> None:
    other = await start_node("other", world.network.transport("c"), NodeFacts(tokens_per_block=32))
    world.left.agent.pull("p", (other.address,), PREFIX, 1, 20_000)
    end = await world.left.engine.expect(SessionEnded, "p")
    assert end.outcome is Outcome.FAILED
    assert "tokens_per_block" in end.reason
    assert not other.engine.events
    await other.agent.close()
