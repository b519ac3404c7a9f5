"""Random traffic on one manager, with every page's content and every invariant checked.

The naive model is the memory: a stamp is the whole prefix it was computed from, so any page in two
places, any page reused while somebody may still read it, any wrong table entry shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from kvcache_core.lease import LeaseState, PageLease
from kvcache_core.sequence import SequenceCache
from tests.kvcache_core.support import BLOCK, LAYOUTS, SCOPE, Rig

SLOTS = 14
TOKEN = st.integers(0, 1)


@dataclass
class Story:
    """A sequence, the tokens written for it, and its wish to go on."""

    cache: SequenceCache
    tokens: list[int]
    is_ready: bool = field(default=False)
    """Whether groups that are not reused have been rebuilt."""


class CacheMachine(RuleBasedStateMachine):
    """Any interleaving of the public operations."""

    @initialize(name=st.sampled_from(sorted(LAYOUTS)), host_slots=st.sampled_from((0, 3, 20)))
    def start(self, name: str, host_slots: int) -> None:
        self.begin(name, host_slots)

    def begin(self, name: str, host_slots: int) -> None:
        """An empty manager of one layout."""
        self.rig = Rig(name, SLOTS, host_slots=host_slots)
        self.has_states = any(g.life_cycle.is_state for g in self.rig.plan.layer_groups)
        self.stories: list[Story] = []
        self.has_lost = False
        """Whether open sequences may have lost their place in the tree."""
        self.leases: list[tuple[PageLease, list[tuple[int, int, object]]]] = []

    def pick(self, data: st.DataObject) -> Story:
        return data.draw(st.sampled_from(self.stories))

    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=30), data=st.data())
    def open(self, tokens: list[int], data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        probed = self.rig.manager.probe(SCOPE, tokens[:limit])
        cache = self.rig.open(tokens, max_match=limit)
        assert cache.matched_tokens == probed <= limit
        self.stories.append(Story(cache, tokens[: cache.matched_tokens]))

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=17))
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        """Grow, write, advance, and commit a part of it."""
        story = self.pick(data)
        cache, rig = story.cache, self.rig
        if cache.is_suspended:
            return
        tokens = story.tokens[: cache.history] + tokens
        before = (
            rig.manager.usage(),
            cache.capacity,
            [cache.block_table(g).tolist() for g in rig.groups],
        )
        if not cache.grow(len(tokens)):
            tables = [cache.block_table(g).tolist() for g in rig.groups]
            assert (rig.manager.usage(), cache.capacity, tables) == before
            return
        for group in rig.groups:
            is_reused = group in cache.reused_groups or story.is_ready
            start = cache.history if is_reused else 0
            rig.memory.write(cache, tokens, start, len(tokens), group)
        story.tokens, story.is_ready = tokens, True
        cache.advance(len(tokens))
        end = (
            len(tokens) if self.has_states else data.draw(st.integers(cache.committed, len(tokens)))
        )
        cache.commit(tokens[cache.committed : end])

    @rule(tokens=st.lists(TOKEN, max_size=12), more=st.integers(0, 7), size=st.integers(1, 30))
    def serve(self, tokens: list[int], more: int, size: int) -> None:
        """A whole request, one of several kinds: what fills the tree and empties it again."""
        self.serve_whole(tokens + [more] * size)

    def serve_whole(self, tokens: list[int]) -> None:
        """Open, compute if there is room, close."""
        cache = self.rig.open(tokens)
        if self.rig.compute(cache, tokens):
            self.rig.verify(cache, tokens)
        cache.close()

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), size=st.integers(1, 30), seed=TOKEN)
    def receive(self, data: st.DataObject, size: int, seed: int) -> None:
        """A transfer writes a prompt: lease, write what the lease names, advance, commit."""
        story = self.pick(data)
        cache, rig = story.cache, self.rig
        if cache.is_suspended or cache.history > cache.committed or story.is_ready:
            return
        tokens = story.tokens[: cache.history] + [seed] * size
        if not cache.grow_to_receive(len(tokens)):
            return
        first = cache.history // rig.plan.tokens_per_block
        lease = cache.lease(first, cache.blocks)
        for group in rig.groups:
            rig.memory.write(cache, tokens, 0, len(tokens), group)
        story.tokens, story.is_ready = tokens, True
        lease.release()
        cache.advance(len(tokens))
        cache.commit(tokens[cache.committed :])

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        """What was matched comes back from the host, or nothing changes."""
        story = self.pick(data)
        if not story.cache.is_suspended:
            assert not story.cache.prefetch() or story.cache.is_resident

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), tokens=st.lists(TOKEN, max_size=20))
    def announce(self, data: st.DataObject, tokens: list[int]) -> None:
        story, manager = self.pick(data), self.rig.manager
        if story.cache.is_suspended:
            return
        prompt = manager.prompt(SCOPE, story.tokens[: story.cache.committed] + tokens)
        story.cache.announce(prompt)
        whole = len(prompt) // BLOCK * BLOCK
        found = manager.look(prompt)
        assert found.reusable_tokens <= found.attention_tokens <= found.known_tokens
        if not self.has_lost:
            assert found.known_tokens // BLOCK * BLOCK + found.in_flight_tokens >= whole

    @precondition(lambda self: self.stories and self.has_states)
    @rule(data=st.data(), tokens=st.lists(TOKEN, min_size=1, max_size=9))
    def snapshot(self, data: st.DataObject, tokens: list[int]) -> None:
        """Compute up to a length, and leave the state there for others."""
        story = self.pick(data)
        cache, rig = story.cache, self.rig
        if cache.is_suspended or cache.history > cache.committed:
            return
        tokens = story.tokens[: cache.history] + tokens
        if not cache.grow(len(tokens)):
            return
        slot = cache.acquire_snapshot_slot()
        for group in rig.groups:
            start = cache.history if group in cache.reused_groups or story.is_ready else 0
            rig.memory.write(cache, tokens, start, len(tokens), group)
        story.tokens, story.is_ready = tokens, True
        cache.advance(len(tokens))
        if slot is None:
            cache.commit(tokens[cache.committed :])
            return
        states = next(g for g in rig.plan.layer_groups if g.life_cycle.is_state)
        rig.memory.content[states.pool_group][slot][0] = tuple(tokens)
        is_recorded = cache.commit_with_snapshot(tokens[cache.committed :])
        assert not is_recorded or rig.manager.probe(SCOPE, tokens) == len(tokens)

    @precondition(lambda self: self.stories and not self.has_states)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        story = self.pick(data)
        cache = story.cache
        if not cache.is_suspended:
            cache.rewind(data.draw(st.integers(cache.committed, cache.history)))
            story.tokens = story.tokens[: cache.history]

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        story = self.pick(data)
        if story.cache.is_suspended:
            return
        child = story.cache.fork()
        if child is not None:
            self.stories.append(Story(child, list(story.tokens), story.is_ready))

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        story = self.pick(data)
        if not story.cache.is_suspended:
            story.cache.suspend()

    @precondition(lambda self: any(story.cache.is_suspended for story in self.stories))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        suspended = [story for story in self.stories if story.cache.is_suspended]
        story = data.draw(st.sampled_from(suspended))
        if story.cache.resume():
            story.tokens = story.tokens[: story.cache.history]
            for group in self.rig.groups:
                if group not in story.cache.reused_groups:
                    end = story.cache.history
                    self.rig.memory.write(story.cache, story.tokens, 0, end, group)

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        story = self.pick(data)
        self.stories.remove(story)
        story.cache.close()

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        story = self.pick(data)
        if story.cache.is_suspended or not story.cache.is_resident:
            return
        cache, plan = story.cache, self.rig.plan
        end = data.draw(st.integers(0, cache.history // plan.tokens_per_block))
        lease = cache.lease(0, end)
        seen: list[tuple[int, int, object]] = []
        for view in lease.views:
            group = plan.layer_groups[plan.views[view].layer_group]
            if group.id in cache.reused_groups and not group.life_cycle.is_state:
                for slot in lease.slots(view).tolist():
                    if slot >= 0:
                        content = tuple(self.rig.memory.content[group.pool_group][slot])
                        seen.append((group.pool_group, slot, content))
        self.leases.append((lease, seen))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, _ = self.leases.pop(index)
        lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        lease, _ = data.draw(st.sampled_from(self.leases))
        if lease.state is LeaseState.ACTIVE:
            lease.quarantine()
            self.has_lost = True

    @rule()
    def clear(self) -> None:
        self.rig.manager.clear()
        self.has_lost = True

    @invariant()
    def everything_holds(self) -> None:
        self.rig.manager.check()
        for story in self.stories:
            cache = story.cache
            is_idle = cache.is_suspended or cache.history < len(story.tokens)
            if is_idle or not cache.is_resident:
                continue
            for group in self.rig.groups:
                if group in cache.reused_groups or story.is_ready:
                    self.rig.memory.verify(cache, story.tokens, cache.history, group)
        for _, seen in self.leases:
            for pool_group, slot, content in seen:
                assert tuple(self.rig.memory.content[pool_group][slot]) == content

    @override
    def teardown(self) -> None:
        for story in self.stories:
            story.cache.close()
        for lease, _ in self.leases:
            lease.release()
        self.rig.manager.check()
        manager = self.rig.manager
        assert manager.available_blocks() == SLOTS
        assert (manager.leased_blocks(), manager.quarantined_blocks()) == (0, 0)
        manager.clear()
        manager.check()
        assert manager.free_blocks() == SLOTS
        assert all(pool.host_free == pool.host_total for pool in manager.usage())


CacheMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCacheMachine = CacheMachine.TestCase
