"""Posts of one pair, made in the order commanded, whole or through staging.

They form one queue. It waits for the endpoint, and for a staging buffer where its head needs one;
whatever is behind waits too. That cannot deadlock. Both ends queue the same posts in one order: the
sender as it sends the ``ChunkSent`` that tell of them, the receiver as these arrive over the one
ordered connection, and the receiver posts every run that it is told of, wanted or not. Take the
first post that has not ended on both ends. All before it have, and none behind it can hold a buffer
that it waits for, because none is made before it: so it gets its buffer on either end, meets its
counterpart and ends. Pairs do not wait for each other: no buffer serves two of them, and a post
waits for buffers and its own peer only.

Gathers run ahead of their posts, as far as there are buffers; what they fill is posted in the order
of the queue. While a pass is under way its pages are this process's own to touch, whatever has
become of the peer, so nobody may be told before it is over that the peer is known dead and pages
are free: that is what ``when_still`` is for.

After the endpoint was lost nothing is made any more, and of a staged receive that ends then only
the buffer matters once its session has given the pages back: nothing is scattered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from transfer.agent_counters import BusyClock, TransferCounters
from transfer.outcome import PostStatus
from transfer.pair_staging import PairStaging
from transfer.plan import TransferPlan
from transfer.region import Piece, Post, Region, Staged
from transfer.session import Session
from transfer.session_commands import PostReceives, PostSends
from transfer.transport import Completion, Endpoint, PageMemory

PostOver = Callable[[Session, Post, Completion], None]
"""Told once of every post that was not withdrawn, never from within :meth:`PairPosts.add`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Time and turns of whoever runs the posts: an event loop."""

    now_s: Callable[[], float]
    soon: Callable[[Callable[[], None]], object]
    """Call back in a later turn."""


@dataclass(frozen=True, eq=False, slots=True)
class _Queued:
    session: Session
    post: Post
    tag: int
    sends: bool


@dataclass(eq=False, slots=True)
class _Gather:
    """A staged send whose buffer is being filled. ``failure`` is empty when it is full."""

    entry: _Queued
    buffer: Any
    failure: str | None = None

    @property
    def message(self) -> Any:
        return self.buffer[: self.entry.post.size_bytes]


class PairPosts:
    """Queue, staging buffers and requests under way of one pair."""

    def __init__(
        self,
        *,
        plan: TransferPlan,
        memory: PageMemory,
        counters: TransferCounters,
        schedule: Schedule,
        over: PostOver,
    ) -> None:
        self.quiet: Final = asyncio.Event()
        """Set while no request and no pass is under way."""
        self.quiet.set()
        self._memory = memory
        self._counters = counters
        self._schedule = schedule
        self._over = over
        self._clock = BusyClock(counters)
        self._queue: deque[_Queued] = deque()
        self._gathers: deque[_Gather] = deque()
        self._passes = 0
        self._still: list[Callable[[], None]] = []
        self._endpoint: Endpoint | None = None
        self._pausing = False
        self._withdrawn = False
        staging = memory.staging
        self._staging = (
            PairStaging(plan, staging) if plan.stages and plan.groups and staging else None
        )

    @property
    def settled(self) -> bool:
        """Whether no request and no pass is under way and no staging buffer in doubt: else this
        holds memory that the peer or a pass may reach.
        """
        return not self._clock.open and not self._passes and not self._doubtful_bytes

    @property
    def staging_bytes(self) -> int:
        """Memory of the staging buffers that were made."""
        return self._staging.buffers.made_bytes if self._staging is not None else 0

    @property
    def _doubtful_bytes(self) -> int:
        return self._staging.buffers.doubtful_bytes if self._staging is not None else 0

    def bind(self, endpoint: Endpoint) -> None:
        """Give the endpoint; posts that waited for it are made."""
        self._endpoint = endpoint
        self._advance()

    def add(self, session: Session, command: PostSends | PostReceives) -> None:
        """Queue the posts of a command."""
        sends = isinstance(command, PostSends)
        for post in command.posts:
            entry = _Queued(session, post, command.tag, sends)
            if self._withdrawn:
                self._end_unmade(entry, "the peer is lost")
            else:
                self._queue.append(entry)
        self._advance()

    def withdraw(self) -> tuple[tuple[Session, Post], ...]:
        """The peer is lost: make no more posts. Those that were not begun; nothing touched their
        pages, and nobody else tells of them. Those that are being gathered end with their pass.
        """
        self._withdrawn = True
        left = tuple((entry.session, entry.post) for entry in self._queue)
        self._queue.clear()
        return left

    def peer_dead(self) -> None:
        """The peer's process is known dead: let go of the buffers in doubt."""
        if self._staging is not None:
            self._counters.staging_bytes_in_doubt -= self._doubtful_bytes
            self._staging.buffers.peer_dead()

    def when_still(self, action: Callable[[], None]) -> None:
        """Call ``action`` when no pass is under way, before the next begins: now, or later. A pass
        needs no peer, so that time comes.
        """
        if self._passes:
            self._still.append(action)
        else:
            action()

    def _advance(self) -> None:
        while self._queue and not self._pausing and not self._still:
            endpoint = self._endpoint
            # What a lost endpoint leaves is withdrawn when the sessions have been told.
            if endpoint is None or not endpoint.alive:
                return
            entry = self._queue[0]
            piece = self._as_it_lies(entry)
            if isinstance(piece, Region):
                if self._gathers:
                    return
                self._queue.popleft()
                self._make_whole(endpoint, entry, piece)
                continue
            if self._staging is None:
                raise RuntimeError("a session staged pages of a pair that cannot stage")
            try:
                buffer = self._staging.buffers.take()
            except MemoryError as error:
                self._queue.popleft()
                self._end_unmade(entry, f"staging buffer: {error}")
                continue
            if buffer is None:
                return
            self._queue.popleft()
            if entry.sends:
                self._gather(self._staging, entry, piece, buffer)
            else:
                self._make_staged_receive(endpoint, self._staging, entry, piece, buffer)

    def _as_it_lies(self, entry: _Queued) -> Piece:
        """What is posted; a piece that this end need not copy is a region here, staged or not at
        the other.
        """
        piece = entry.post.region
        if isinstance(piece, Region) or self._staging is None:
            return piece
        if entry.sends:
            return self._staging.sent_from(piece) or piece
        return self._staging.received_into(piece) or piece

    def _make_whole(self, endpoint: Endpoint, entry: _Queued, region: Region) -> None:
        buffer = self._memory.region(
            region.pool_group, region.pool, region.first_slot, region.num_slots
        )
        self._make(endpoint, entry, buffer, lambda end: self._over(entry.session, entry.post, end))

    def _gather(self, staging: PairStaging, entry: _Queued, piece: Staged, buffer: Any) -> None:
        gather = _Gather(entry, buffer)

        def over(failure: str) -> None:
            gather.failure = failure
            self._end_pass(entry, failure)
            self._post_gathered(staging)
            self._after_pass()

        self._gathers.append(gather)
        self._begin_pass()
        self._pausing = True
        try:
            staging.gather(piece, gather.message, over)
        except ValueError as error:
            over(str(error))
        if gather.failure is None:
            self._pausing = False
        else:
            # It was over at once: the loop does other things between two such gathers.
            self._schedule.soon(self._go_on)

    def _post_gathered(self, staging: PairStaging) -> None:
        """Post what is full, in order."""
        while self._gathers and self._gathers[0].failure is not None:
            gather = self._gathers.popleft()
            endpoint = self._endpoint
            if gather.failure:
                reason = f"gather: {gather.failure}"
            elif self._withdrawn or endpoint is None or not endpoint.alive:
                reason = "the peer is lost"
            else:
                self._make_staged_send(endpoint, staging, gather)
                continue
            staging.buffers.give_back(gather.buffer)
            self._end_unmade(gather.entry, reason)

    def _make_staged_send(self, endpoint: Endpoint, staging: PairStaging, gather: _Gather) -> None:
        def over(end: Completion) -> None:
            self._let_go(staging, gather.buffer, end)
            self._over(gather.entry.session, gather.entry.post, _of_pages(end))
            self._advance()

        self._make(endpoint, gather.entry, gather.message, over)

    def _make_staged_receive(
        self, endpoint: Endpoint, staging: PairStaging, entry: _Queued, piece: Staged, buffer: Any
    ) -> None:
        message = buffer[: entry.post.size_bytes]

        def over(end: Completion) -> None:
            # A closed session has given its pages back, whatever its posts did afterwards.
            if end.status is PostStatus.DONE and not entry.session.closed:
                self._scatter(staging, entry, piece, message, buffer)
                return
            self._let_go(staging, buffer, end)
            self._over(entry.session, entry.post, _of_pages(end))
            self._advance()

        self._make(endpoint, entry, message, over)

    def _scatter(
        self, staging: PairStaging, entry: _Queued, piece: Staged, message: Any, buffer: Any
    ) -> None:
        """Bring a message that has arrived to its pages."""

        def over(failure: str) -> None:
            staging.buffers.give_back(buffer)
            self._end_pass(entry, failure)
            status = PostStatus.REVOKED if failure else PostStatus.DONE
            self._over(entry.session, entry.post, Completion(status, failure))
            self._after_pass()

        self._begin_pass()
        try:
            staging.scatter(piece, message, lambda why: over(f"scatter: {why}" if why else ""))
        except ValueError as error:
            over(f"scatter: {error}")

    def _let_go(self, staging: PairStaging, buffer: Any, end: Completion) -> None:
        """The request over this buffer has ended."""
        if end.status is PostStatus.LOST:
            before = self._doubtful_bytes
            staging.buffers.doubt(buffer)
            self._counters.staging_bytes_in_doubt += self._doubtful_bytes - before
        else:
            staging.buffers.give_back(buffer)

    def _begin_pass(self) -> None:
        self._passes += 1
        self.quiet.clear()

    def _end_pass(self, entry: _Queued, failure: str) -> None:
        self._passes -= 1
        if not failure:
            self._counters.staged_bytes_total += entry.post.size_bytes

    def _after_pass(self) -> None:
        if not self._passes:
            waiting, self._still = self._still, []
            for action in waiting:
                action()
        self._look_quiet()
        self._advance()

    def _look_quiet(self) -> None:
        if not self._clock.open and not self._passes:
            self.quiet.set()

    def _go_on(self) -> None:
        self._pausing = False
        self._advance()

    def _make(
        self, endpoint: Endpoint, entry: _Queued, buffer: Any, over: Callable[[Completion], None]
    ) -> None:
        def ended(end: Completion) -> None:
            done = end.status is PostStatus.DONE
            self._clock.end(self._schedule.now_s(), entry.post.size_bytes if done else 0)
            # A scatter may follow, and is part of what is waited for.
            over(end)
            self._look_quiet()

        self._clock.begin(self._schedule.now_s())
        self.quiet.clear()
        if entry.sends:
            endpoint.post_send(buffer, entry.tag, ended)
        else:
            endpoint.post_receive(buffer, entry.tag, ended)

    def _end_unmade(self, entry: _Queued, reason: str) -> None:
        end = Completion(PostStatus.REVOKED, reason)
        self._schedule.soon(lambda: self._over(entry.session, entry.post, end))


def _of_pages(end: Completion) -> Completion:
    """What the end of a request over a staging buffer is to the pages that it stood for."""
    if end.status is PostStatus.LOST:
        # The peer may reach the buffer, and the buffer only.
        return Completion(PostStatus.REVOKED, end.reason)
    return end
