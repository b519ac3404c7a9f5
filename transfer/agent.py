"""What the engine sees of transfers: verbs that return at once, events that come back.

Lives in one event loop and owns sessions, control connections and the transport; the engine owns
leases. Verbs may be called from any thread; they are carried out in the order of the calls. Every
accepted verb that names a lease is answered by one ``LeaseEnded`` for it, every granted request by
one ``SessionEnded``, however many ranks of the peer it has sessions with; deadlines run in the
loop, whether or not traffic comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from transfer.agent_config import AgentConfig
from transfer.agent_counters import TransferCounters
from transfer.agent_events import AgentEvent, LeaseEnded, SessionEnded
from transfer.agent_figures import PairState, TransferFigures
from transfer.agent_pair import Pair, PairOwner, Route, Side
from transfer.agent_peers import PeerConnector
from transfer.agent_requests import RequestBook, RunningRequest
from transfer.grants_in import GrantsIn
from transfer.grants_out import GrantOrder, GrantsOut, Order
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease
from transfer.leased_pages import LeasedPages
from transfer.loops import call_in
from transfer.messages import Grant, HandoffData, Pull
from transfer.outcome import Outcome
from transfer.peers import dp_group, granters_to
from transfer.pending import EndedSessions, PendingCancels
from transfer.plan import TransferPlan
from transfer.prefix import Prefix
from transfer.pull_order import PullOrder
from transfer.rank_info import RankInfo
from transfer.request_transfer import LocalEvent
from transfer.session import Session
from transfer.session_events import (
    AnnounceRequested,
    CancelRequested,
    DeclineRequested,
    FailureReported,
    FoundRequested,
    HandOffRequested,
    NoDecodeRequested,
)
from transfer.transport import PageMemory, Transport, main_lane
from transfer.warm_pairs import WarmPairs

logger = logging.getLogger(__name__)

STOPPING: Final = "this worker is stopping"
ITSELF: Final = "an instance does not pull from itself"
HEALTH_S: Final = 0.5
"""How often the transport is looked at: its death is nobody's completion."""


class TransferAgent(PairOwner):
    """Transfers of one rank, in both directions."""

    def __init__(
        self,
        *,
        rank_info: RankInfo,
        instance: Sequence[RankInfo],
        views: Mapping[int, int],
        transport: Transport,
        memory: PageMemory,
        config: AgentConfig,
        deliver: Callable[[AgentEvent], None],
    ) -> None:
        """``instance`` is all ranks of this rank's instance, itself included; ``views`` gives a
        view id for each layer group (:func:`views_of_groups`); ``deliver`` is called in the loop
        and must not block. What ``rank_info`` says of data address and staging is filled in here.
        Raises ValueError unless the rank and all others of its dp group are in the instance.
        """
        dp_group(instance, rank_info.shape.dp_rank)
        if rank_info.rank_id not in {rank.rank_id for rank in instance}:
            raise ValueError(f"expected {rank_info.rank_id} among the ranks of its own instance")
        staging = memory.staging
        told = {} if staging is None else {"staging_message_bytes": staging.message_bytes}
        self._info = rank_info.model_copy(update={"can_stage": staging is not None, **told})
        self._instance = tuple(instance)
        self._transport = transport
        self._memory = memory
        self._config = config
        self._deliver = deliver
        self.counters: Final = TransferCounters()
        self._cancels = PendingCancels()
        self._ended = EndedSessions()
        self._book = RequestBook(
            pages=LeasedPages(views),
            counters=self.counters,
            deliver=deliver,
            over=self._request_over,
        )
        self._peers = PeerConnector(
            info=self._info,
            config=config,
            transport=transport,
            make_pair=self._make_pair,
        )
        self._grants_in = GrantsIn(
            book=self._book, cancels=self._cancels, ended=self._ended, config=config
        )
        self._grants_out = GrantsOut(
            peers=self._peers,
            book=self._book,
            limits=config.limits,
            unstarted=self._end_unstarted,
            now_s=lambda: self._running_loop().time(),
        )
        self._pairs_changed: Callable[[], None] = _nobody_watches
        self._warm = WarmPairs(self.warm, lambda: self._pairs_changed())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._health: asyncio.TimerHandle | None = None
        self._closed = False

    def watch_pairs(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called in the loop, where it must not block, when :attr:`figures` tells
        of other pairs. Before ``start``.
        """
        self._pairs_changed = changed

    async def start(self) -> PeerAddress:
        """Listen for endpoints and control connections; return where peers find this rank."""
        self._loop = asyncio.get_running_loop()
        address = await self._peers.start()
        self._look_at_transport()
        return address

    async def close(self) -> None:
        """End every session, connection and endpoint. Idempotent."""
        if self._closed or self._loop is None:
            self._closed = True
            return
        self._closed = True
        if self._health is not None:
            self._health.cancel()
        for request_id in self._grants_out.dialling:
            self._grants_out.stop(request_id, STOPPING)
        for running in self._book.all:
            running.tell(FailureReported(STOPPING))
        self._warm.close()
        await self._peers.close()
        logger.info(
            "moved %d bytes of pages in %d sessions, at %.2f GB/s while pages moved",
            self.counters.bytes_total,
            self.counters.sessions_total,
            self.counters.gb_per_s,
        )

    async def warm(self, peer: PeerAddress) -> None:
        """Connect to a context rank ahead of the first request, data endpoint and all.

        Raises ConnectionError with every reason.
        """
        self._running_loop()
        pair = await self._peers.pair_with(peer)
        await asyncio.shield(pair.bound)
        if not pair.open:
            raise ConnectionError(f"{peer.rank_id} was lost as soon as it was connected")

    # Verbs. Thread safe, non-blocking.

    def grant(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prompt_tokens: int,
        deadline_ms: int,
    ) -> None:
        """Generation: promise ``prompt_tokens`` to ``sources``, all ranks of the dp group of the
        context instance that serves the request; all is over in ``deadline_ms``.
        """
        end_s = self._running_loop().time() + deadline_ms / 1000
        self._call(self._open, GrantOrder(request_id, tuple(sources), prompt_tokens, end_s))

    def ready(
        self, request_id: str, first_block: int, end_block: int, lease: TransferLease
    ) -> None:
        """Generation: ``lease`` holds the pages for blocks ``[first_block, end_block)``."""
        self._call(self._give, Side.GENERATION, request_id, first_block, end_block, lease)

    def announce(self, request_id: str) -> None:
        """Context: the first chunk is about to run."""
        self._call(self._tell, Side.CONTEXT, request_id, AnnounceRequested())

    def ship(self, request_id: str, first_block: int, end_block: int, lease: TransferLease) -> None:
        """Context: KV of blocks ``[first_block, end_block)`` is final. In order, from block 0."""
        self._call(self._give, Side.CONTEXT, request_id, first_block, end_block, lease)

    def hand_off(self, request_id: str, handoff: HandoffData) -> None:
        """Context leader: the first tokens are sampled and every block was shipped."""
        self._call(self._tell, Side.CONTEXT, request_id, HandOffRequested(handoff))

    def hand_off_pages(self, request_id: str) -> None:
        """Context rank that does not lead: every block was shipped; the leader tells the rest."""
        self._call(self._tell, Side.CONTEXT, request_id, HandOffRequested(None))

    def no_decode(self, request_id: str) -> None:
        """Context: the first token ended the request."""
        self._call(self._tell, Side.CONTEXT, request_id, NoDecodeRequested())

    def pull(
        self,
        request_id: str,
        sources: Sequence[PeerAddress],
        prefix: Prefix,
        least_blocks: int,
        deadline_ms: int,
    ) -> None:
        """Any rank: ask ``sources``, all ranks of one dp group of another instance, for at least
        ``least_blocks`` blocks of ``prefix``; all is over in ``deadline_ms``. ``ready`` follows
        ``PrefixFoundReceived``.
        """
        end_s = self._running_loop().time() + deadline_ms / 1000
        order = PullOrder(request_id, tuple(sources), prefix, least_blocks, end_s)
        self._call(self._pull, order)

    def found(self, request_id: str, end_block: int) -> None:
        """Source: blocks up to ``end_block`` of a pulled prefix are leased; ``ship`` and
        ``hand_off`` follow.
        """
        self._call(self._tell, Side.CONTEXT, request_id, FoundRequested(end_block))

    def decline(self, request_id: str, reason: str) -> None:
        """Source: a pulled prefix is not here, or not served now."""
        self._call(self._tell, Side.CONTEXT, request_id, DeclineRequested(reason))

    def keep_warm(self, peers: Sequence[PeerAddress]) -> None:
        """Be connected to these context ranks, all of them and no others, ahead of requests. What
        is missing, and why, is in :attr:`figures`.
        """
        self._call(self._want, tuple(peers))

    def cancel(self, request_id: str, reason: str) -> None:
        """Either side: not wanted any more. Also remembered for a request that is not known yet."""
        self._call(self._cancel, request_id, reason)

    def peer_known_dead(self, incarnation: Incarnation) -> None:
        """Whoever started the processes says that all ranks are dead: doubts about their accesses
        are over.
        """
        self._call(self._peers.mark_dead, incarnation)

    # What others may look at, from any thread.

    @property
    def failure(self) -> str:
        """Empty while transfers work; else why this worker is not ready."""
        return self._transport.failure

    @property
    def lanes(self) -> dict[str, str]:
        """Main transport in use by peer rank; peers without an endpoint are left out."""
        pairs = self._peers.open_pairs
        return {str(pair.peer.rank_id): main_lane(pair.lanes) for pair in pairs if pair.lanes}

    @property
    def refusals(self) -> dict[str, tuple[str, ...]]:
        """Peer ranks that do not fit this one, with every reason, for readiness."""
        return dict(self._peers.refusals)

    @property
    def figures(self) -> TransferFigures:
        """Pairs and totals now."""
        connected = tuple(
            PairState(pair.side, pair.peer.rank_id, main_lane(pair.lanes), "")
            for pair in self._peers.open_pairs
            if pair.lanes
        )
        dialled = {pair.peer for pair in connected if pair.side is Side.GENERATION}
        missing = tuple(
            PairState(Side.GENERATION, rank, "", reason)
            for rank, reason in self._warm.missing.items()
            if rank not in dialled
        )
        counters = self.counters
        return TransferFigures(
            pairs=connected + missing,
            late_dials=counters.late_dials_total,
            busy_ms=round(counters.busy_s * 1000),
            busy_bytes=counters.busy_bytes,
            staged_bytes=counters.staged_bytes_total,
            staging_bytes=self._peers.staging_bytes,
        )

    # PairOwner, in the loop.

    @override
    def reported(self, session: Session, event: AgentEvent, cause: object) -> None:
        self._book.heard(session, event, cause)

    @override
    def opened(self, pair: Pair, opening: Grant | Pull) -> None:
        self._grants_in.take(pair, opening)

    @override
    def session_closed(self, pair: Pair, session: Session) -> None:
        self._ended.add(session.session)
        self._peers.prune()

    @override
    def pair_bound(self, pair: Pair) -> None:
        self._pairs_changed()

    @override
    def pair_lost(self, pair: Pair, reason: str) -> None:
        self._peers.lost(pair)
        if pair.side is Side.GENERATION:
            self._warm.lost(pair.peer.rank_id, reason)
        self._pairs_changed()

    @override
    def known_dead(self, incarnation: Incarnation) -> bool:
        return self._peers.is_dead(incarnation)

    # In the loop.

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the transfer agent is not started; await start() first")
        return self._loop

    def _call(self, verb: Callable[..., None], *arguments: Any) -> None:
        call_in(self._running_loop(), verb, *arguments)

    def _make_pair(self, side: Side, peer: RankInfo) -> Pair:
        own = self._peers.info
        if side is Side.CONTEXT:
            route = Route(TransferPlan.between(own, peer))
        else:
            route = Route(TransferPlan.between(peer, own), self._granters(peer))
        return Pair(
            side=side,
            peer=peer,
            route=route,
            transport=self._transport,
            memory=self._memory,
            owner=self,
            counters=self.counters,
        )

    def _granters(self, peer: RankInfo) -> int:
        """How many ranks of this instance have sessions with a context rank; 0 without this one."""
        granters = granters_to(peer, self._instance, self._info.shape.dp_rank)
        return len(granters) if self._info.rank in {rank.rank for rank in granters} else 0

    def _want(self, peers: tuple[PeerAddress, ...]) -> None:
        if not self._closed:
            self._warm.want(peers)

    def _pull(self, order: PullOrder) -> None:
        if self._info.incarnation in {source.incarnation for source in order.sources}:
            # Both ends would be one id of one engine.
            self._end_unstarted(order.request_id, Outcome.FAILED, ITSELF, "engine")
        else:
            self._open(order)

    def _open(self, order: Order) -> None:
        request_id = order.request_id
        reason = self._cancels.take(request_id)
        if reason is not None:
            self._end_unstarted(request_id, Outcome.CANCELLED, reason, "cancelled")
            return
        known = self._book.undecided(Side.GENERATION, request_id) is not None
        if known or request_id in self._grants_out.dialling:
            logger.error("request %s was opened twice by this engine; ignored", request_id)
            return
        if self._closed:
            self._end_unstarted(request_id, Outcome.FAILED, STOPPING, "engine")
            return
        self._grants_out.open(order)

    def _give(
        self,
        side: Side,
        request_id: str,
        first_block: int,
        end_block: int,
        lease: TransferLease,
    ) -> None:
        running = self._book.current(side, request_id)
        if running is None:
            self._deliver(LeaseEnded(request_id, lease))
        else:
            running.give(first_block, end_block, lease)

    def _tell(self, side: Side, request_id: str, event: LocalEvent) -> None:
        running = self._book.current(side, request_id)
        if running is not None:
            running.tell(event)

    def _cancel(self, request_id: str, reason: str) -> None:
        if self._grants_out.stop(request_id, reason):
            return
        running = [self._book.current(side, request_id) for side in Side]
        known = [one for one in running if one is not None]
        for one in known:
            one.tell(CancelRequested(reason))
        if not known:
            self._cancels.remember(request_id, reason)

    def _request_over(self, running: RunningRequest) -> None:
        self._cancels.over(running.request_id)
        if running.side is Side.CONTEXT:
            self._grants_in.over(running)

    def _end_unstarted(self, request_id: str, outcome: Outcome, reason: str, kind: str) -> None:
        if outcome is not Outcome.SUCCEEDED:
            self.counters.failures[kind] += 1
        self._cancels.over(request_id)
        self._deliver(SessionEnded(request_id, outcome, reason, 0, 0))

    def _look_at_transport(self) -> None:
        failure = self._transport.failure
        if failure:
            self._peers.drop_all(failure)
        elif not self._closed:
            loop = asyncio.get_running_loop()
            self._health = loop.call_later(HEALTH_S, self._look_at_transport)


def _nobody_watches() -> None:
    """Until ``watch_pairs``."""
