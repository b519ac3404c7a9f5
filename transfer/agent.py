"""What the engine sees of transfers: verbs that return at once, events that come back.

Lives in one event loop and owns sessions, control connections and the transport; the engine owns
leases. Verbs may be called from any thread; they are carried out in the order of the calls. Every
accepted verb that names a lease is answered by one ``LeaseEnded`` for it, every granted request by
one ``SessionEnded``; deadlines run in the loop, whether or not traffic comes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from transfer.agent_config import AgentConfig
from transfer.agent_counters import TransferCounters
from transfer.agent_events import AgentEvent, LeaseEnded, SessionEnded
from transfer.agent_pair import Pair, PairOwner, Side, fail_session
from transfer.agent_peers import PeerConnector
from transfer.context_session import ContextSession
from transfer.control import HandshakeError
from transfer.generation_session import GenerationSession
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import LeasedBlocks, TransferLease, leased_blocks
from transfer.messages import CancelSession, Grant, HandoffData
from transfer.outcome import Outcome
from transfer.pending import EndedSessions, PendingCancels
from transfer.plan import GroupSide, TransferPlan
from transfer.rank_info import RankInfo
from transfer.session import Session
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    FailureReported,
    GrantRequested,
    HandOffRequested,
    NoDecodeRequested,
    PagesReady,
    ShipRequested,
)
from transfer.story import InvalidTransition
from transfer.transport import PageMemory, Transport, main_lane

logger = logging.getLogger(__name__)

STOPPING: Final = "this worker is stopping"
HEALTH_S: Final = 0.5
"""How often the transport is looked at: its death is nobody's completion."""


@dataclass(frozen=True, slots=True)
class _Running:
    pair: Pair
    session: Session


class TransferAgent(PairOwner):
    """Transfers of one rank, in both directions."""

    def __init__(
        self,
        *,
        rank_info: RankInfo,
        views: Mapping[int, int],
        transport: Transport,
        memory: PageMemory,
        config: AgentConfig,
        deliver: Callable[[AgentEvent], None],
    ) -> None:
        """``views`` gives a view id for each layer group (:func:`views_of_groups`); ``deliver`` is
        called in the loop and must not block. What ``rank_info`` says of data address and staging
        is filled in here.
        """
        staging = memory.staging
        told = {} if staging is None else {"staging_message_bytes": staging.message_bytes}
        self._info = rank_info.model_copy(update={"can_stage": staging is not None, **told})
        self._views = views
        self._transport = transport
        self._memory = memory
        self._config = config
        self._deliver = deliver
        self.counters: Final = TransferCounters()
        self._running: dict[Side, dict[str, _Running]] = {side: {} for side in Side}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._cancels = PendingCancels()
        self._ended = EndedSessions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: PeerConnector | None = None
        self._health: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> PeerAddress:
        """Listen for endpoints and control connections; return where peers find this rank."""
        self._loop = asyncio.get_running_loop()
        peers = PeerConnector(
            info=self._info,
            config=self._config,
            transport=self._transport,
            make_pair=self._make_pair,
        )
        self._peers = peers
        address = await peers.start()
        self._look_at_transport()
        return address

    async def close(self) -> None:
        """End every session, connection and endpoint. Idempotent."""
        if self._closed or self._peers is None:
            self._closed = True
            return
        self._closed = True
        if self._health is not None:
            self._health.cancel()
        for request_id in tuple(self._dialling):
            self._stop_dialling(request_id, STOPPING)
        for running in self._all_running():
            running.pair.drive(running.session, FailureReported(STOPPING))
        await self._peers.close()
        logger.info(
            "moved %d bytes of pages in %d sessions, at %.2f GB/s while pages moved",
            self.counters.bytes_total,
            self.counters.sessions_total,
            self.counters.gb_per_s,
        )

    async def warm(self, peer: PeerAddress) -> None:
        """Connect to a context worker ahead of the first request, data endpoint and all.

        Raises ConnectionError with every reason.
        """
        pair = await self._connector().pair_with(peer)
        await asyncio.shield(pair.bound)

    # Verbs. Thread safe, non-blocking.

    def grant(
        self, request_id: str, source: PeerAddress, prompt_tokens: int, deadline_ms: int
    ) -> None:
        """Generation: promise ``prompt_tokens`` to ``source``; all is over in ``deadline_ms``."""
        self._call(self._grant, request_id, source, prompt_tokens, deadline_ms)

    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        """Generation: ``lease`` holds the pages for blocks ``[first_block, end_block)``."""
        self._call(self._ready, request_id, first_block, end_block, lease)

    def announce(self, request_id: str) -> None:
        """Context: the first chunk is about to run."""
        self._call(self._tell, Side.CONTEXT, request_id, AnnounceRequested())

    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        """Context: KV of blocks ``[first_block, end_block)`` is final. In order, from block 0."""
        self._call(self._ship, request_id, first_block, end_block, lease)

    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        """Context: the first tokens are sampled and every block was shipped."""
        self._call(self._tell, Side.CONTEXT, request_id, HandOffRequested(handoff))

    def no_decode(self, request_id: str) -> None:
        """Context: the first token ended the request."""
        self._call(self._tell, Side.CONTEXT, request_id, NoDecodeRequested())

    def cancel(self, request_id: str, reason: str) -> None:
        """Either side: not wanted any more. Also remembered for a request that is not known yet."""
        self._call(self._cancel, request_id, reason)

    def peer_known_dead(self, incarnation: Incarnation) -> None:
        """Whoever started the process says that it is dead: doubts about its accesses are over."""
        self._call(self._peer_known_dead, incarnation)

    # What others may look at, from any thread.

    @property
    def failure(self) -> str:
        """Empty while transfers work; else why this worker is not ready."""
        return self._transport.failure

    @property
    def lanes(self) -> dict[str, str]:
        """Main transport in use by peer; peers without an endpoint are left out."""
        pairs = self._peers.open_pairs if self._peers is not None else ()
        return {str(pair.incarnation): main_lane(pair.lanes) for pair in pairs if pair.lanes}

    @property
    def refusals(self) -> dict[str, tuple[str, ...]]:
        """Peers that do not fit this rank, with every reason, for readiness."""
        return self._peers.refusals if self._peers is not None else {}

    # PairOwner, in the loop.

    @override
    def deliver(self, event: AgentEvent) -> None:
        self._deliver(event)

    @override
    def granted(self, pair: Pair, grant: Grant) -> None:
        if grant.session in self._ended:
            return
        if pair.side is not Side.CONTEXT:
            pair.refuse("protocol: only a generation rank may grant")
            return
        if self._active(Side.CONTEXT, grant.request_id) is not None:
            logger.warning("request %s was granted twice", grant.request_id)
            pair.send(
                CancelSession(session=grant.session, reason="this request has a session already")
            )
            return
        session = ContextSession(
            request_id=grant.request_id,
            session=grant.session,
            peer=pair.incarnation,
            plan=pair.plan,
            limits=self._config.limits,
            costs=self._config.costs,
        )
        self._start(Side.CONTEXT, pair, session)
        pair.drive(session, grant)
        reason = self._cancels.take(grant.request_id)
        if reason is not None:
            pair.drive(session, CancelRequested(reason))

    @override
    def session_closed(self, pair: Pair, session: Session) -> None:
        self._ended.add(session.session)
        self._cancels.over(session.request_id)
        running = self._running[pair.side].get(session.request_id)
        if running is not None and running.session is session:
            del self._running[pair.side][session.request_id]
        self._connector().prune()

    @override
    def pair_lost(self, pair: Pair) -> None:
        self._connector().lost(pair)

    @override
    def known_dead(self, incarnation: Incarnation) -> bool:
        return self._connector().is_dead(incarnation)

    # In the loop.

    def _call(self, verb: Callable[..., None], *arguments: Any) -> None:
        if self._loop is None:
            raise RuntimeError("the transfer agent is not started; await start() first")
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(verb, *arguments)

    def _connector(self) -> PeerConnector:
        if self._peers is None:
            raise RuntimeError("the transfer agent is not started; await start() first")
        return self._peers

    def _make_pair(self, side: Side, peer: RankInfo) -> Pair:
        info = self._connector().info
        sender, receiver = (info, peer) if side is Side.CONTEXT else (peer, info)
        return Pair(
            side=side,
            peer=peer,
            plan=TransferPlan.between(sender, receiver),
            transport=self._transport,
            memory=self._memory,
            owner=self,
            counters=self.counters,
        )

    def _start(self, side: Side, pair: Pair, session: Session) -> None:
        self._running[side][session.request_id] = _Running(pair, session)
        pair.add(session)

    def _active(self, side: Side, request_id: str) -> _Running | None:
        """The request's session, unless its outcome is decided."""
        running = self._running[side].get(request_id)
        if running is None or running.session.outcome is not Outcome.PENDING:
            return None
        return running

    def _all_running(self) -> tuple[_Running, ...]:
        return tuple(running for side in Side for running in self._running[side].values())

    def _grant(
        self, request_id: str, source: PeerAddress, prompt_tokens: int, deadline_ms: int
    ) -> None:
        reason = self._cancels.take(request_id)
        if reason is not None:
            self._end_unstarted(request_id, Outcome.CANCELLED, reason, "cancelled")
            return
        if request_id in self._dialling or self._active(Side.GENERATION, request_id) is not None:
            logger.error("request %s was granted twice by this engine; ignored", request_id)
            return
        if self._closed:
            self._end_unstarted(request_id, Outcome.FAILED, STOPPING, "engine")
            return
        pair = self._connector().open_pair(Side.GENERATION, source.incarnation)
        if pair is not None:
            self._grant_over(pair, request_id, prompt_tokens, deadline_ms)
            return
        task = self._create_task(self._dial(request_id, source, prompt_tokens, deadline_ms))
        self._dialling[request_id] = task

    async def _dial(
        self, request_id: str, source: PeerAddress, prompt_tokens: int, deadline_ms: int
    ) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_ms / 1000
        try:
            async with asyncio.timeout_at(end_s):
                pair = await self._connector().pair_with(source)
        except TimeoutError:
            self._dialling.pop(request_id, None)
            self._end_unstarted(
                request_id, Outcome.FAILED, f"{source.incarnation}: no connection", "deadline"
            )
            return
        except HandshakeError as error:
            self._dialling.pop(request_id, None)
            self._end_unstarted(
                request_id, Outcome.FAILED, f"{source.incarnation}: {error}", "connect"
            )
            return
        self._dialling.pop(request_id, None)
        left_ms = max(int((end_s - loop.time()) * 1000), 1)
        self._grant_over(pair, request_id, prompt_tokens, left_ms)

    def _stop_dialling(self, request_id: str, reason: str) -> None:
        # A task that was never run cannot report its own cancellation.
        self._dialling.pop(request_id).cancel()
        self._end_unstarted(request_id, Outcome.CANCELLED, reason, "cancelled")

    def _grant_over(
        self, pair: Pair, request_id: str, prompt_tokens: int, deadline_ms: int
    ) -> None:
        session = GenerationSession(
            request_id=request_id,
            session=secrets.token_hex(8),
            peer=pair.incarnation,
            plan=pair.plan,
            limits=self._config.limits,
            tag=secrets.randbits(64),
        )
        self._start(Side.GENERATION, pair, session)
        pair.drive(session, GrantRequested(prompt_tokens, deadline_ms))

    def _ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        running = self._running[Side.GENERATION].get(request_id)
        if running is None:
            self.deliver(LeaseEnded(request_id, lease))
            return
        sides = tuple(group.receiver for group in running.pair.plan.groups)
        self._give(
            running,
            lease,
            lambda: PagesReady(end_block, self._blocks(lease, sides, first_block, end_block)),
        )

    def _ship(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        running = self._running[Side.CONTEXT].get(request_id)
        if running is None:
            self.deliver(LeaseEnded(request_id, lease))
            return
        sides = tuple(group.sender for group in running.pair.plan.groups)
        self._give(
            running,
            lease,
            lambda: ShipRequested(
                first_block, end_block, self._blocks(lease, sides, first_block, end_block)
            ),
        )

    def _blocks(
        self, lease: TransferLease, sides: tuple[GroupSide, ...], first_block: int, end_block: int
    ) -> LeasedBlocks:
        if (lease.first_block, lease.end_block) != (first_block, end_block):
            raise ValueError(
                f"expected a lease of blocks [{first_block}, {end_block}), got "
                f"[{lease.first_block}, {lease.end_block})"
            )
        return leased_blocks(lease, sides, self._views)

    def _give(self, running: _Running, lease: TransferLease, event: Callable[[], object]) -> None:
        """Hand pages to a session; a session that does not take them gives them back at once."""
        try:
            running.pair.drive(running.session, event())
        except (InvalidTransition, ValueError) as error:
            self.deliver(LeaseEnded(running.session.request_id, lease))
            fail_session(running.pair, running.session, str(error))

    def _tell(self, side: Side, request_id: str, event: object) -> None:
        running = self._running[side].get(request_id)
        if running is None:
            return
        try:
            running.pair.drive(running.session, event)
        except InvalidTransition as error:
            fail_session(running.pair, running.session, str(error))

    def _cancel(self, request_id: str, reason: str) -> None:
        known = False
        if request_id in self._dialling:
            self._stop_dialling(request_id, reason)
            return
        for side in Side:
            if request_id in self._running[side]:
                known = True
                self._tell(side, request_id, CancelRequested(reason))
        if not known:
            self._cancels.remember(request_id, reason)

    def _peer_known_dead(self, incarnation: Incarnation) -> None:
        self._connector().mark_dead(incarnation)

    def _end_unstarted(self, request_id: str, outcome: Outcome, reason: str, kind: str) -> None:
        self.counters.failures[kind] += 1
        self._cancels.over(request_id)
        self.deliver(SessionEnded(request_id, outcome, reason, 0, 0))

    def _create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def _look_at_transport(self) -> None:
        failure = self._transport.failure
        if failure:
            self._connector().drop_all(failure)
        elif not self._closed:
            loop = asyncio.get_running_loop()
            self._health = loop.call_later(HEALTH_S, self._look_at_transport)
