"""Engines that do as a script says, over a real cache manager: they allocate, compute, lease, land.

The order of calls is that of ``worker.context`` and ``worker.generation``, of
``worker.served_pulls`` and ``worker.pulls``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache_core.layout import LayoutPlan
from kvcache_core.lease import LeaseState, PageLease
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.sequence import SequenceCache
from tests.sim.transfer_agent import SimAgent
from tests.sim.transfer_memory import Place, StampedMemory
from tests.sim.transfer_process import CONTEXT, Process
from tests.sim.transfer_terrain import BLOCK
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    GrantReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    NoDecodeReceived,
    PrefixFoundReceived,
    PullReceived,
    SessionEnded,
)
from transfer.lease import TransferLease
from transfer.messages import ChoiceHandoff, HandoffData
from transfer.outcome import Outcome

SCOPE = b"model"
RETRY_MS = (5, 40)
TOKEN = 7
FIRST_TOKENS = HandoffData(choices=(ChoiceHandoff(token=TOKEN),), cached_tokens=0)
NO_TOKENS = HandoffData(choices=(), cached_tokens=0)
HERE_BY_NOW = "the prefix is here by now"


@dataclass(frozen=True)
class Script:
    """One request: what the engines do with it. Ranges of milliseconds, both ends included."""

    prompt: tuple[int, ...]
    chunk_blocks: int = 2
    prefill_ms: tuple[int, int] = (0, 10)
    """From the grant until the first chunk begins."""
    chunk_ms: tuple[int, int] = (30, 30)
    allocate_ms: tuple[int, int] = (0, 5)
    """From the announcement until the generation engine looks for pages."""
    decode_ms: tuple[int, int] = (0, 60)
    deadline_ms: int = 20_000
    no_decode: bool = False
    least_blocks: int | None = None
    """A prefix pull with fewer blocks is not worth it; None for a request that is granted."""
    deeds: tuple[tuple[int, int, str], ...] = ()
    """(side, milliseconds after the start, "cancel" or "fail")."""

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """Of the prompt: what a pull asks for."""
        return self.prompt[: len(self.prompt) // BLOCK * BLOCK]


@dataclass(eq=False)
class Leg:
    """One engine's part in a request."""

    name: str
    script: Script
    cache: SequenceCache | None = None
    over: bool = False
    received: bool = False
    lands_from: int = 0
    lands_to: int = 0


@dataclass(eq=False)
class Heard:
    """What the transfer has told an engine about one request id."""

    ends: list[SessionEnded] = field(default_factory=list)
    ended_ms: list[int] = field(default_factory=list)
    handoffs: int = 0
    chunks_end: int = 0


class SimEngine:
    """The engine of one process."""

    def __init__(
        self,
        process: Process,
        layout: LayoutPlan,
        slots: tuple[int, ...],
        memory: StampedMemory,
        agent: SimAgent,
        script_of: Callable[[str], Script],
        hears_ms: tuple[int, int],
    ) -> None:
        self.process = process
        self.agent = agent
        self.memory = memory
        self.manager = UnifiedKVCacheManager(layout, slots, memory, incarnation=process.name)
        self.heard: dict[str, Heard] = {}
        self.leases: dict[int, PageLease] = {}
        """Leases given to sessions and not given back."""
        self.quarantines = 0
        self.pulled = 0
        """Prefixes that came in whole."""
        self._layout = layout
        self._block = layout.tokens_per_block
        self._script_of = script_of
        self._legs: dict[str, Leg] = {}
        self._attempts = 0
        self._hears_ms = hears_ms
        self._inbox: deque[AgentEvent] = deque()
        agent.deliver = self.hear

    def expect(self, request_id: str) -> None:
        """The front end asks for a request: this engine has a leg of it from now on."""
        self._open_leg(request_id)

    def hear(self, event: AgentEvent) -> None:
        """What the transfer tells; the engine takes it in a later turn, in order."""
        if isinstance(event, LeaseEnded):
            self.memory.check_over(_own(event.lease))
        if isinstance(event, SessionEnded):
            self._heard(event.request_id).ended_ms.append(self.process.clock.now_ms)
        self._inbox.append(event)
        self.process.later(self._hears_ms, self._take_next)

    def _take_next(self) -> None:
        self._take(self._inbox.popleft())

    def _take(self, event: AgentEvent) -> None:
        match event:
            case GrantReceived(request_id=request_id):
                leg = self._open_leg(request_id)
                self.process.later(leg.script.prefill_ms, lambda: self._prefill(request_id, leg))
            case PullReceived(request_id=request_id):
                leg = self._open_leg(request_id)
                self.process.later(leg.script.prefill_ms, lambda: self._serve(leg, event))
            case PrefixFoundReceived(request_id=request_id):
                leg = self._legs[request_id]
                self.process.later(leg.script.allocate_ms, lambda: self._land_prefix(leg, event))
            case AnnounceReceived(request_id=request_id):
                leg = self._legs[request_id]
                self.process.later(leg.script.allocate_ms, lambda: self._land(request_id, leg))
            case ChunkReceived(request_id=request_id, end_block=end_block):
                heard = self._heard(request_id)
                assert heard.chunks_end <= end_block, "chunks were told out of order"
                heard.chunks_end = end_block
                self._check_content(self._legs[request_id], end_block)
            case HandoffReceived(request_id=request_id, data=data):
                if self._legs[request_id].script.least_blocks is not None:
                    assert data == NO_TOKENS
                elif data is None:
                    assert not self.agent.info.shape.leads
                else:
                    assert data.choices[0].token == TOKEN
                self._decode(request_id)
            case NoDecodeReceived():
                pass
            case SessionEnded(request_id=request_id):
                self._end(request_id, event)
            case LeaseEnded(lease=lease):
                self._give_back(_own(lease))
            case LeaseInDoubt(lease=lease):
                self.quarantines += 1
                lease.quarantine()

    def check_home(self) -> None:
        """No lease is out, no leg holds pages, every page can be had."""
        manager = self.manager
        manager.check()
        assert not self.leases, f"{self.process.name}: leases were never given back"
        assert not any(leg.cache for leg in self._legs.values()), "a sequence was never closed"
        assert (manager.leased_blocks(), manager.quarantined_blocks()) == (0, 0)
        for usage in manager.usage():
            assert usage.available == usage.total, f"{self.process.name}: {usage}"

    def check_doubt(self) -> None:
        """Every lease that is still out is in quarantine, and for a reason."""
        assert not self._inbox
        for lease in self.leases.values():
            assert lease.state is LeaseState.QUARANTINED, f"{self.process.name} leaks a lease"
            assert self.memory.is_doubtful(lease), "pages are in doubt that nobody can reach"

    # Context.

    def _prefill(self, request_id: str, leg: Leg) -> None:
        if leg.over:
            return
        prompt, block = leg.script.prompt, self._block
        # The last block is always computed: its logits are needed.
        cache = self.manager.open(SCOPE, prompt, max_match=(len(prompt) - 1) // block * block)
        if not cache.grow(len(prompt)):
            cache.close()
            self.process.later(RETRY_MS, lambda: self._prefill(request_id, leg))
            return
        leg.cache = cache
        first = cache.matched_tokens // block
        self._lend(leg, cache, first)
        self.agent.announce(request_id)
        if first:
            self._ship(request_id, leg, 0, first)
        self.process.later(leg.script.chunk_ms, lambda: self._chunk(request_id, leg, first))

    def _chunk(self, request_id: str, leg: Leg, start: int) -> None:
        cache, prompt = leg.cache, leg.script.prompt
        if leg.over or cache is None:
            return
        blocks = -(-len(prompt) // self._block)
        end = min(start + leg.script.chunk_blocks, blocks)
        self._compute(leg, cache, start, end)
        tokens = min(end * self._block, len(prompt))
        cache.advance(tokens)
        cache.commit(prompt[cache.committed : tokens])
        self._ship(request_id, leg, start, end)
        if end < blocks:
            self.process.later(leg.script.chunk_ms, lambda: self._chunk(request_id, leg, end))
            return
        if leg.script.no_decode:
            self.agent.no_decode(request_id)
        else:
            self._hand_off(request_id, FIRST_TOKENS)
        self._close(leg)

    def _compute(self, leg: Leg, cache: SequenceCache, start: int, end: int) -> None:
        for group in self._layout.layer_groups:
            table = cache.block_table(group.id)
            for block in range(start, end):
                if table[block] >= 0:
                    place = (group.pool_group, int(table[block]))
                    self.memory.compute(leg.name, place, self._mark(leg, block), block)

    def _ship(self, request_id: str, leg: Leg, start: int, end: int) -> None:
        assert leg.cache is not None
        lease = self._lease(leg.cache, start, end)
        self.agent.give(request_id, start, end, lease)

    def _hand_off(self, request_id: str, data: HandoffData) -> None:
        self.agent.hand_off(request_id, data if self.agent.info.shape.leads else None)

    # Source of a prefix.

    def remember(self, prompt: tuple[int, ...]) -> None:
        """Compute a prompt for the prefix cache alone."""
        leg = Leg("before", Script(prompt))
        leg.cache = cache = self.manager.open(SCOPE, prompt, max_match=0)
        assert cache.grow(len(prompt))
        self._lend(leg, cache, 0)
        self._compute(leg, cache, 0, -(-len(prompt) // self._block))
        cache.advance(len(prompt))
        cache.commit(prompt)
        self._close(leg)

    def _serve(self, leg: Leg, event: PullReceived) -> None:
        """Whatever befalls the pull meanwhile, what is leased is given to the transfer."""
        if leg.over:
            return
        tokens = tuple(event.prefix.tokens.tolist())
        cache = self._open_whole_blocks(tokens, len(tokens))
        blocks = cache.matched_tokens // self._block
        request_id, step_ms = event.request_id, leg.script.chunk_ms
        if blocks < event.least_blocks:
            cache.close()
            self.agent.decline(request_id, f"{blocks} blocks are here")
            return
        lease = self._lease(cache, 0, blocks)
        cache.close()
        self.agent.found(request_id, blocks)

        def ship() -> None:
            self.agent.give(request_id, 0, blocks, lease)
            self.process.later(step_ms, hand_off)

        def hand_off() -> None:
            if not leg.over:
                self._hand_off(request_id, NO_TOKENS)

        self.process.later(step_ms, ship)

    # Puller.

    def _land_prefix(self, leg: Leg, event: PrefixFoundReceived) -> None:
        if leg.over:
            return
        request_id, end = event.request_id, event.end_block
        assert leg.script.least_blocks is not None
        assert leg.script.least_blocks <= end <= len(leg.script.whole_blocks) // self._block
        cache = self._open_whole_blocks(leg.script.prompt, end * self._block)
        first = cache.matched_tokens // self._block
        if first == end or not cache.grow_to_receive(end * self._block):
            cache.close()
            self.agent.cancel(request_id, HERE_BY_NOW if first == end else "no room")
            return
        leg.cache = cache
        self._wait_for(request_id, leg, first, end)

    # Generation.

    def _land(self, request_id: str, leg: Leg) -> None:
        if leg.over:
            return
        prompt, block = leg.script.prompt, self._block
        cache = self.manager.open(SCOPE, prompt, max_match=len(prompt))
        if cache.matched_tokens < len(prompt):
            cache.close()
            cache = self._open_whole_blocks(prompt, len(prompt))
        matched = cache.matched_tokens
        if not cache.grow_to_receive(len(prompt)):
            cache.close()
            self.process.later(RETRY_MS, lambda: self._land(request_id, leg))
            return
        leg.cache = cache
        end = -(-len(prompt) // block)
        first = end if matched == len(prompt) else matched // block
        self._wait_for(request_id, leg, first, end)

    def _wait_for(self, request_id: str, leg: Leg, first: int, end: int) -> None:
        """Say where blocks ``[first, end)`` go."""
        assert leg.cache is not None
        leg.lands_from, leg.lands_to = first, end
        self._lend(leg, leg.cache, first)
        lease = self._lease(leg.cache, first, end)
        self.agent.give(request_id, first, end, lease)

    def _decode(self, request_id: str) -> None:
        leg, prompt = self._legs[request_id], self._legs[request_id].script.prompt
        assert leg.cache is not None
        assert not leg.received, "a request was handed off twice"
        leg.received = True
        self._heard(request_id).handoffs += 1
        self.pulled += leg.script.least_blocks is not None
        self._check_content(leg, leg.lands_to)
        tokens = min(leg.lands_to * self._block, len(prompt))
        leg.cache.advance(tokens)
        if leg.cache.committed < tokens:
            leg.cache.commit(prompt[leg.cache.committed : tokens])
        self.process.later(leg.script.decode_ms, lambda: self._close(leg))

    def _check_content(self, leg: Leg, end_block: int) -> None:
        """Every page that was to come before ``end_block`` is in and right."""
        if leg.over or leg.cache is None:
            return
        for group in self._layout.layer_groups:
            table = leg.cache.block_table(group.id)
            for block in range(leg.lands_from, end_block):
                if table[block] >= 0:
                    place = (group.pool_group, int(table[block]))
                    assert self.memory.holds(place, self._mark(leg, block), block), "wrong page"

    # Both.

    def _open_whole_blocks(self, tokens: tuple[int, ...], limit: int) -> SequenceCache:
        """A sequence that holds whole blocks only, of the first ``limit`` tokens at most."""
        cache = self.manager.open(SCOPE, tokens, max_match=limit // self._block * self._block)
        while excess := cache.matched_tokens % self._block:
            limit = cache.matched_tokens - excess
            cache.close()
            cache = self.manager.open(SCOPE, tokens, max_match=limit)
        return cache

    def _open_leg(self, request_id: str) -> Leg:
        earlier = self._legs.get(request_id)
        assert earlier is None or earlier.over, f"{request_id} has a leg here"
        self._attempts += 1
        leg = Leg(f"{request_id}@{self.process.name}/{self._attempts}", self._script_of(request_id))
        self._legs[request_id] = leg
        return leg

    def _end(self, request_id: str, event: SessionEnded) -> None:
        heard = self._heard(request_id)
        heard.ends.append(event)
        assert len(heard.ends) <= self.agent.started[request_id], f"{request_id} ended twice"
        leg = self._legs.get(request_id)
        if leg is None:
            return
        leg.over = True
        if not leg.received and not (
            self.process.side == CONTEXT and event.outcome is Outcome.SUCCEEDED
        ):
            # A step that uses the pages may be running.
            self.process.later((0, 60), lambda: self._close(leg))

    def _close(self, leg: Leg) -> None:
        if leg.cache is not None:
            leg.cache.close()
            leg.cache = None

    def _lend(self, leg: Leg, cache: SequenceCache, first_block: int) -> None:
        places: list[Place] = []
        for group in self._layout.layer_groups:
            table = cache.block_table(group.id)
            places += [(group.pool_group, int(slot)) for slot in table[first_block:] if slot >= 0]
        self.memory.lend(leg.name, places)

    def _lease(self, cache: SequenceCache, first_block: int, end_block: int) -> PageLease:
        lease = cache.lease(first_block, end_block)
        self.memory.leased(lease)
        self.leases[id(lease)] = lease
        return lease

    def _give_back(self, lease: PageLease) -> None:
        assert self.leases.pop(id(lease), None) is lease, "a lease ended twice"
        self.memory.released(lease)
        lease.release()

    def _heard(self, request_id: str) -> Heard:
        return self.heard.setdefault(request_id, Heard())

    def _mark(self, leg: Leg, block: int) -> int:
        return hash(leg.script.prompt[: (block + 1) * self._block])


def _own(lease: TransferLease) -> PageLease:
    assert isinstance(lease, PageLease)
    return lease
