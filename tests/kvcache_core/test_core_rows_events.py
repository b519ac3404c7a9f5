"""What others are told: events that rebuild the tree, blocks on their way, identical blocks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvcache_core.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from kvcache_core.hashing import prefix_keys, root_key
from kvcache_core.pages import NO_NODE
from tests.kvcache_core.support import BLOCK, SCOPE, Rig

PROMPT = list(range(100, 122))  # five full blocks of 4 and half of a sixth
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=14)


class Subscriber:
    """Rebuilds the tree from events: each key with the key above it."""

    def __init__(self) -> None:
        self.above: dict[bytes, bytes] = {}
        self.next = 0
        self.missed = 0

    def read(self, event: CacheEvent) -> None:
        """Events may be missing; then only what follows a CacheCleared can be trusted."""
        self.missed += event.sequence - self.next
        self.next = event.sequence + 1
        if isinstance(event, CacheCleared):
            self.above, self.missed = {}, 0
        elif isinstance(event, BlocksStored):
            above = event.parent
            for key in event.keys:
                assert self.missed or key not in self.above, "stored twice"
                self.above[key] = above
                above = key
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                assert self.missed or key in self.above, "removed but never stored"
                self.above.pop(key, None)


def truth(rig: Rig) -> dict[bytes, bytes]:
    """Every full block of the tree and the key above it."""
    tree = rig.manager._store.tree
    return {
        tree.key(node): tree.key(int(tree.parent[node]))
        for node in tree.nodes()
        if tree.length[node] == rig.plan.tokens_per_block
    }


@pytest.mark.parametrize("layout", ["full", "mixed, two pool groups", "windows only", "recurrent"])
@settings(max_examples=15, deadline=None)
@given(prompts=PROMPTS, lost=st.sets(st.integers(0, 60)), hosts=st.sampled_from((0, 5)))
def test_a_subscriber_that_lost_events_rebuilds_exactly_the_tree(
    layout: str, prompts: list[list[int]], lost: set[int], hosts: int
) -> None:
    rig = Rig(layout, 14, host_slots=hosts)
    subscriber, faithful = Subscriber(), Subscriber()
    for number, prompt in enumerate(prompts):
        sequence = rig.open(prompt)
        rig.compute(sequence, prompt)
        sequence.close()
        if number == 7:
            rig.manager.clear()
        for event in rig.manager.take_events():
            faithful.read(event)
            if event.sequence not in lost:
                subscriber.read(event)
        assert faithful.above == truth(rig)
    rig.manager.resynchronise()
    rig.cache([1] * 9)
    for event in rig.manager.take_events():
        subscriber.read(event)
        faithful.read(event)
    assert (subscriber.missed, faithful.missed) == (0, 0)
    assert subscriber.above == faithful.above == truth(rig)


def test_a_chain_is_told_once_with_the_key_above_it() -> None:
    rig = Rig("full", 32)
    rig.cache(PROMPT)
    rig.cache([*PROMPT[:8], *range(12)])
    rig.manager.take_events()
    rig.manager.resynchronise()
    cleared, *stored = rig.manager.take_events()
    assert isinstance(cleared, CacheCleared)
    keys = prefix_keys(SCOPE, PROMPT, BLOCK)
    told = {event.parent: event.keys for event in stored if isinstance(event, BlocksStored)}
    assert told[root_key(SCOPE)] == tuple(keys[:2])
    assert len(stored) == 3
    assert {event.parent for event in stored[1:] if isinstance(event, BlocksStored)} == {keys[1]}


def test_blocks_on_their_way_are_told_behind_the_known_ones() -> None:
    rig = Rig("full", 32)
    rig.cache(PROMPT[:8])
    owner = rig.open(PROMPT)
    prompt = rig.manager.prompt(SCOPE, PROMPT)
    assert rig.manager.look(prompt).in_flight_tokens == 0
    owner.announce(prompt)
    found = rig.manager.look(rig.manager.prompt(SCOPE, [*PROMPT[:17], 1, 2]))
    assert (found.known_tokens, found.in_flight_tokens) == (8, 8)
    other = rig.manager.prompt(SCOPE, [*PROMPT[:10], 1, 2])
    assert rig.manager.look(other).in_flight_tokens == 0
    rig.manager.check()
    assert rig.compute(owner, PROMPT[:14])
    found = rig.manager.look(prompt)
    assert (found.known_tokens, found.in_flight_tokens) == (12, 8)
    assert rig.compute(owner, PROMPT)
    assert rig.manager.look(prompt).in_flight_tokens == 0


def test_blocks_of_an_unknown_scope_can_be_on_their_way() -> None:
    rig = Rig("full", 32)
    owner = rig.open(PROMPT)
    owner.announce(rig.manager.prompt(SCOPE, PROMPT))
    assert rig.manager.look(rig.manager.prompt(SCOPE, PROMPT)).in_flight_tokens == 20
    assert rig.manager.look(rig.manager.prompt(b"other", PROMPT)).in_flight_tokens == 0


@pytest.mark.parametrize("way", ["close", "suspend", "announce again"])
def test_announced_blocks_end_with_their_sequence(way: str) -> None:
    rig = Rig("full", 32)
    first, second = rig.open(PROMPT), rig.open(PROMPT)
    prompt = rig.manager.prompt(SCOPE, PROMPT)
    first.announce(prompt)
    second.announce(prompt)
    first.close()
    assert rig.manager.look(prompt).in_flight_tokens == 20
    rig.manager.check()
    if way == "announce again":
        second.announce(rig.manager.prompt(SCOPE, []))
    else:
        {"close": second.close, "suspend": second.suspend}[way]()
    assert rig.manager.look(prompt).in_flight_tokens == 0
    assert not rig.manager._store.in_flight
    rig.manager.check()


def test_who_publishes_no_more_announces_nothing() -> None:
    rig = Rig("full", 32)
    sequence = rig.open(PROMPT)
    rig.manager.clear()
    sequence.announce(rig.manager.prompt(SCOPE, PROMPT))
    assert rig.manager.look(rig.manager.prompt(SCOPE, PROMPT)).in_flight_tokens == 0


@pytest.mark.parametrize(
    "layout", ["full", "mixed, two pool groups", "optional draft", "recurrent"]
)
def test_a_commit_onto_an_identical_block_stores_it_once(layout: str) -> None:
    rig = Rig(layout, 64)
    first, second = rig.open(PROMPT), rig.open(PROMPT)
    assert rig.compute(first, PROMPT)
    stored = rig.manager.counters.blocks_stored
    own = {group: second.block_table(group).tolist() for group in rig.groups}
    assert rig.compute(second, PROMPT)
    rig.manager.check()
    assert rig.manager.counters.blocks_stored == stored
    assert rig.manager.counters.pages_rebased >= 5
    for group in rig.plan.layer_groups:
        if not group.life_cycle.is_state:
            mine = second.block_table(group.id)[:5].tolist()
            assert mine == first.block_table(group.id)[:5].tolist() != own[group.id][:5]
    rig.verify(second, PROMPT)
    first.close()
    rig.verify(second, PROMPT)
    second.close()
    rig.manager.check()
    assert rig.manager.available_blocks() == 64


def test_a_commit_gives_a_block_the_pages_that_it_lacks() -> None:
    """Who computed a windowed group's page that the tree has not leaves it there."""
    rig = Rig("mixed, two pool groups", 64)
    receiver = rig.open(PROMPT)
    assert receiver.grow_to_receive(20)
    for group in rig.groups:
        rig.memory.write(receiver, PROMPT, 0, 20, group)
    receiver.advance(20)
    receiver.commit(PROMPT[:20])
    assert rig.manager.probe(SCOPE, [*PROMPT[:8], 1]) == 0
    sequence = rig.open(PROMPT, max_match=0)
    assert rig.compute(sequence, PROMPT)
    assert rig.manager.probe(SCOPE, [*PROMPT[:8], 1]) == 8
    rig.verify(sequence, PROMPT)
    rig.manager.check()


def test_a_commit_onto_host_pages_frees_them_unless_somebody_holds_them() -> None:
    rig = Rig("full", 6, host_slots=6)
    computing = rig.open([1] * 16, max_match=0)
    rig.cache([1] * 16)
    rig.cache([2] * 24)
    holder = rig.open([1] * 9)
    assert rig.manager.usage()[0].host_free == 2
    assert rig.compute(computing, [1] * 16)
    rig.manager.check()
    usage = rig.manager.usage()[0]
    assert usage.host_total - usage.host_free == 6
    pool = rig.manager._store.pools[0]
    assert [pool.node[page] for page in holder._pages.groups[0].used] == [NO_NODE, NO_NODE]
    computing.close()
    assert holder.grow(9)
    rig.verify(holder, [1] * 9)
    rig.manager.check()
