"""The manager against a naive model of its tree and tiers, and its match against brute force.

Together with test_state_machine.py these are the random steps of every run. They count what they
have met, so that a rule that stops reaching a case is noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from kvcache_core.pages import NO_NODE, NO_PAGE
from kvcache_core.priorities import PagePriorities
from kvcache_core.sequence import SequenceCache
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore
from tests.kvcache_core.support import BLOCK, LAYOUTS, SCOPE, Rig
from tests.kvcache_core.test_state_machine import TOKEN as BIT
from tests.kvcache_core.test_state_machine import CacheMachine
from tests.kvcache_core.tree_model import Holder, Node, Path, TreeModel, common

SIZE = 2
SLOTS = 6
TOKEN = st.integers(0, 2)
TOKENS = st.lists(TOKEN, min_size=1, max_size=11)
PRIORITY = st.sampled_from((0, 35, 35, 90))
SETTINGS = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
WEIGHTED = (*sorted(LAYOUTS), *["recurrent"] * 6)
"""States have the most to go wrong."""
ROUNDS = 6
"""The rarest event is missing from about one round in four; then there is more traffic."""
REACHED = (
    "demoted",
    "onboarded",
    "moved a page that another one holds",
    "rebased",
    "rebased onto a page on the host",
    "lost a branch",
    "copied",
    "resumed",
    "refused",
    "snapshot inside a known block",
)


def path_of(store: CacheStore, node: int) -> Path:
    """All tokens up to the end of a block."""
    tokens = b""
    while store.tree.parent[node] != NO_NODE:
        tokens = store.tree.tokens(node) + tokens
        node = int(store.tree.parent[node])
    return tuple(memoryview(tokens).cast("i").tolist()) if tokens else ()


class ModelMachine(RuleBasedStateMachine):
    """One full group: every block, page, tier, priority and the order of loss, after every step."""

    seen: Counter[str]

    @initialize(host_slots=st.sampled_from((0, 3, 12)))
    def start(self, host_slots: int) -> None:
        self.rig = Rig("full", SLOTS, tokens_per_block=SIZE, host_slots=host_slots)
        self.store = self.rig.manager._store
        self.model = TreeModel(SIZE, SLOTS, host_slots)
        self.model.seen = self.seen
        self.pairs: list[tuple[SequenceCache, Holder]] = []

    def pick(self, data: st.DataObject, *, suspended: bool) -> tuple[SequenceCache, Holder]:
        wanted = [pair for pair in self.pairs if pair[0].is_suspended == suspended]
        return data.draw(st.sampled_from(wanted))

    def take_match(self, cache: SequenceCache, holder: Holder, tokens: list[int]) -> None:
        """Of blocks that match equally far any will do; the model takes the manager's."""
        length = cache.committed
        assert length == self.model.longest(tokens)
        last: Path = tuple(tokens[:length])
        if length % SIZE:
            page = self.rig.manager._store.sequences[cache._id]
            assert page is cache
            node = int(self.store.pools[0].node[cache._pages.groups[0].pages[length // SIZE]])
            last = path_of(self.store, node)
            assert self.model.can_serve(last, tokens, length)
        self.model.hold(holder, tokens[:length], last)

    @rule(tokens=TOKENS, data=st.data(), priority=PRIORITY)
    def open(self, tokens: list[int], data: st.DataObject, priority: int) -> None:
        self.open_up_to(tokens, data.draw(st.integers(0, len(tokens))), priority)

    @precondition(lambda self: any(node.page.on_host for node in self.model.nodes.values()))
    @rule(data=st.data(), more=TOKENS, priority=PRIORITY)
    def open_two(self, data: st.DataObject, more: list[int], priority: int) -> None:
        """Two requests with the same prefix, a part of which lies on the host."""
        hosted = [path for path, node in self.model.nodes.items() if node.page.on_host]
        path = data.draw(st.sampled_from(sorted(hosted)))
        shorter = data.draw(st.integers(0, len(path) - 1))
        for tokens in ([*path, *more], list(path[: len(path) - shorter])):
            self.open_up_to(tokens, len(tokens), priority)
        for _ in range(data.draw(st.integers(0, 2))):  # they bring their pages back, and leave
            cache, holder = self.pairs.pop()
            if not cache.is_resident:
                assert cache.prefetch() == self.model.grow(holder, cache.history, cache.capacity)
            self.model.end(holder)
            cache.close()
            self.model.holders.remove(holder)

    def open_up_to(self, tokens: list[int], limit: int, priority: int) -> None:
        """Open, and hold the same in the model."""
        priorities = PagePriorities(attention=priority)
        cache = self.rig.manager.open(SCOPE, tokens, max_match=limit, priorities=priorities)
        holder = Holder(priority)
        self.take_match(cache, holder, tokens[:limit])
        self.model.holders.append(holder)
        self.pairs.append((cache, holder))

    @rule(tokens=st.lists(TOKEN, min_size=5, max_size=12), priority=PRIORITY)
    def serve(self, tokens: list[int], priority: int) -> None:
        """A whole request: what fills the tree."""
        self.serve_up_to(tokens, len(tokens) - 1, priority)

    @rule(tokens=st.lists(TOKEN, min_size=3, max_size=3), priority=st.sampled_from((35, 90)))
    def storm(self, tokens: list[int], priority: int) -> None:
        """More than the device can keep."""
        for place in range(4):
            self.serve_up_to([tokens[place % 3], place, *tokens[::-1] * 3], 0, priority)

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data(), priority=PRIORITY)
    def serve_again(self, data: st.DataObject, priority: int) -> None:
        """What the tree has, computed anew, best where a page lies on the host."""
        hosted = [path for path, node in self.model.nodes.items() if node.page.on_host]
        path = data.draw(st.sampled_from(sorted(hosted or self.model.nodes)))
        self.serve_up_to(list(path), 0, priority)

    def serve_up_to(self, tokens: list[int], limit: int, priority: int) -> None:
        """Open, compute, commit and close, here and in the model."""
        self.open_up_to(tokens, limit, priority)
        cache, holder = self.pairs.pop()
        could = self.model.grow(holder, cache.history, len(tokens))
        assert cache.grow(len(tokens)) == could
        if could:
            holder.tokens = tokens
            cache.advance(len(tokens))
            part = tokens[cache.committed :]
            cache.commit(part)
            self.model.commit(holder, part)
        self.model.end(holder)
        cache.close()
        self.model.holders.remove(holder)

    @precondition(lambda self: any(not cache.is_suspended for cache, _ in self.pairs))
    @rule(data=st.data(), tokens=TOKENS)
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        """Grow, advance, and commit a part of it."""
        cache, holder = self.pick(data, suspended=False)
        tokens = holder.tokens[: cache.history] + tokens
        could = self.model.grow(holder, cache.history, len(tokens))
        assert cache.grow(len(tokens)) == could
        self.seen["refused"] += not could
        if not could:
            return
        holder.tokens = tokens
        cache.advance(len(tokens))
        end = data.draw(st.integers(cache.committed, len(tokens)))
        part = tokens[cache.committed : end]
        cache.commit(part)
        self.model.commit(holder, part)

    @precondition(lambda self: any(not cache.is_suspended for cache, _ in self.pairs))
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        cache, holder = self.pick(data, suspended=False)
        if not cache.is_resident:
            assert cache.prefetch() == self.model.grow(holder, cache.history, cache.capacity)

    @precondition(lambda self: any(not cache.is_suspended for cache, _ in self.pairs))
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        cache, holder = self.pick(data, suspended=False)
        cache.suspend()
        self.model.end(holder)

    @precondition(lambda self: any(cache.is_suspended for cache, _ in self.pairs))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        cache, holder = self.pick(data, suspended=True)
        wanted, tokens, committed = cache.history, holder.tokens, holder.committed
        known = tokens[:committed]
        before = self.model.longest(known)
        # any of the equal partial blocks would do, but a resume that fails shows none
        ends = [path for path in self.model.nodes if self.model.can_serve(path, known, before)]
        if before % SIZE and len(ends) > 1:
            return
        self.model.hold(holder, known[:before], ends[0] if before % SIZE else ())
        could = self.model.grow(holder, before, max(wanted, before))
        if not could:
            pages, holder.pages, holder.tip = holder.pages, [], None
            self.model._release(pages[::-1])
            holder.tokens, holder.committed = tokens, committed
        assert cache.resume() == could
        self.seen["resumed"] += could

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        cache, holder = pair
        if not cache.is_suspended:
            self.model.end(holder)
        cache.close()
        self.pairs.remove(pair)
        self.model.holders.remove(holder)

    @rule(tokens=TOKENS)
    def probe(self, tokens: list[int]) -> None:
        found = self.rig.manager.look(self.rig.manager.prompt(SCOPE, tokens))
        expected = self.model.longest(tokens)
        assert found.reusable_tokens == found.known_tokens == expected

    @invariant()
    def the_model_agrees(self) -> None:
        self.seen["steps"] += 1
        self.rig.manager.check()
        pool, tree = self.store.pools[0], self.store.tree
        real: dict[Path, tuple[bool, int, int, bool]] = {}
        paths: dict[int, Path] = {}
        for node in tree.nodes():
            page = int(tree.pages[0, node])
            paths[page] = path_of(self.store, node)
            real[paths[page]] = (
                page >= SLOTS,
                int(pool.priority[page]),
                int(pool.holders[page]),
                bool(pool.cached[page]),
            )
        assert real == {
            path: (
                node.page.on_host,
                node.page.priority,
                node.page.holders,
                node.page.cached_at is not None,
            )
            for path, node in self.model.nodes.items()
        }
        for queue, on_host in ((pool.device_queue, False), (pool.host_queue, True)):
            expected = [p.node.path for p in self.model.queue(on_host=on_host) if p.node]
            assert [paths[page] for page in queue.ordered()] == expected
        usage = pool.usage()
        assert usage.free == self.model.free(on_host=False)
        assert usage.host_free == self.model.free(on_host=True)
        for cache, holder in self.pairs:
            if not cache.is_suspended:
                assert cache._publishes == self.model.publishes(holder)
                assert isinstance(holder.tip, Node | None)


def brute_force(rig: Rig, tokens: list[int]) -> tuple[int, int]:
    """(reusable, known) tokens of a prompt: every length and every block is tried."""
    store, size = rig.manager._store, rig.plan.tokens_per_block
    blocks = {path_of(store, node): node for node in store.tree.nodes()}
    known = max((common(path, tokens) for path in blocks), default=0)
    for length in range(len(tokens), 0, -1):
        for last in _ends(blocks, tokens, length, size):
            if all(_serves(store, blocks, group, last, length) for group in range(len(rig.groups))):
                return length, known
    return 0, known


def _ends(blocks: dict[Path, int], tokens: list[int], length: int, size: int) -> Iterator[Path]:
    start = (length - 1) // size * size
    for path in blocks:
        if start < len(path) <= start + size and common(path, tokens) >= length:
            yield path


def _serves(
    store: CacheStore, blocks: dict[Path, int], group: int, last: Path, length: int
) -> bool:
    """Whether one group can go on after ``length`` tokens whose last block is ``last``."""
    cycle, size = store.groups[group].life_cycle, store.tokens_per_block
    if cycle.policy is not ReusePolicy.REQUIRED:
        return True
    if cycle.is_state:
        return len(last) == length and store.tree.pages[group, blocks[last]] != NO_PAGE
    for position in range(length):
        is_sink = position // size < cycle.sink_blocks
        is_seen = cycle.window is None or position > length - cycle.window
        end = (position // size + 1) * size
        path = last if end > len(last) - 1 and end >= length else last[:end]
        if (is_sink or is_seen) and store.tree.pages[group, blocks[path]] == NO_PAGE:
            return False
    return True


class MatchMachine(CacheMachine):
    """The traffic of test_state_machine.py; any prompt matches as far as brute force finds."""

    seen: Counter[str]

    @initialize(name=st.sampled_from(WEIGHTED), host_slots=st.sampled_from((0, 3, 20)))
    @override
    def start(self, name: str, host_slots: int) -> None:
        self.begin(name, host_slots)
        tree = self.rig.manager._store.tree
        subtree = tree.subtree

        def counting(node: int) -> list[int]:
            nodes = subtree(node)
            self.seen["lost a branch"] += len(nodes) > 1 and tree.parent[node] != NO_NODE
            return nodes

        tree.subtree = counting  # type: ignore[method-assign]

    @rule(tokens=st.lists(BIT, min_size=1, max_size=30))
    def query(self, tokens: list[int]) -> None:
        self.check_look(tokens)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def query_again(self, data: st.DataObject, cut: int) -> None:
        """What some sequence has computed: known far, reusable as far as its pages go."""
        tokens = self.pick(data).tokens
        self.check_look(tokens[: len(tokens) - cut])

    def check_look(self, tokens: list[int]) -> None:
        """The manager's answer is that of brute force."""
        self.seen["queries"] += 1
        found = self.rig.manager.look(self.rig.manager.prompt(SCOPE, tokens))
        expected = brute_force(self.rig, tokens)
        assert (found.reusable_tokens, found.known_tokens) == expected
        inside = expected[0] % BLOCK > 0 and expected[1] // BLOCK > expected[0] // BLOCK
        self.seen["snapshot inside a known block"] += inside

    @rule(tokens=st.lists(BIT, min_size=1, max_size=9), more=st.lists(BIT, min_size=5, max_size=9))
    def turns(self, tokens: list[int], more: list[int]) -> None:
        """Two turns of a conversation, and the second one again."""
        self.serve_whole(tokens)
        self.serve_whole([*tokens, *more])
        self.check_look([*tokens, *more][:-1])

    @invariant()
    def count(self) -> None:
        self.seen["steps"] += 1

    @override
    def teardown(self) -> None:
        counters = self.rig.manager.counters
        for name, count in (
            ("onboarded", counters.pages_onboarded),
            ("demoted", counters.pages_demoted),
        ):
            self.seen[f"{name}, any layout"] += count
        super().teardown()


def test_the_manager_equals_its_model_and_its_match_brute_force() -> None:
    seen: Counter[str] = Counter()
    for _ in range(ROUNDS):
        for machine, examples in ((ModelMachine, 120), (MatchMachine, 60)):
            counted = type(machine.__name__, (machine,), {"seen": seen})
            run_state_machine_as_test(counted, settings=settings(SETTINGS, max_examples=examples))
        if all(seen[name] for name in REACHED):
            break
    print(dict(seen))
    assert seen["steps"] >= 2000
    assert [name for name in REACHED if not seen[name]] == []
    assert seen["onboarded, any layout"] > 0
