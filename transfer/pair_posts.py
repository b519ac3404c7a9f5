"""Posts of one pair, made in the order commanded, whole or through staging.

They form one queue. It waits for the endpoint, and for a staging buffer where its head needs one;
whatever is behind waits too. That cannot deadlock. Both ends queue the same posts in one order: the
sender as it sends the ``ChunkSent`` that tell of them, the receiver as these arrive over the one
ordered connection, and the receiver posts every run that it is told of, wanted or not. Take the
first post that has not ended on both ends. All before it have, and none behind it can hold a buffer
that it waits for, because none is made before it: so it gets its buffer on either end, meets its
counterpart and ends. Pairs do not wait for each other: no buffer serves two of them, and a post
waits for buffers and its own peer only.

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
from transfer.region import Post, Region, Staged
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
        """Set while no request is under way."""
        self.quiet.set()
        self._memory = memory
        self._counters = counters
        self._schedule = schedule
        self._over = over
        self._clock = BusyClock(counters)
        self._queue: deque[_Queued] = deque()
        self._endpoint: Endpoint | None = None
        self._pausing = False
        self._withdrawn = False
        staging = memory.staging
        self._staging = (
            PairStaging(plan, staging) if plan.stages and plan.groups and staging else None
        )

    @property
    def settled(self) -> bool:
        """Whether no request is under way and no staging buffer in doubt: else this holds memory
        that the peer may reach.
        """
        return not self._clock.open and not self._doubtful_bytes

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
        """The peer is lost: make no more posts. Those that were not made; nothing touched their
        pages, and nobody else tells of them.
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

    def _advance(self) -> None:
        while self._queue and not self._pausing:
            endpoint = self._endpoint
            # What a lost endpoint leaves is withdrawn when the sessions have been told.
            if endpoint is None or not endpoint.alive:
                return
            entry = self._queue[0]
            piece = entry.post.region
            if isinstance(piece, Region):
                self._queue.popleft()
                self._make_whole(endpoint, entry, piece)
                continue
            if self._staging is None:
                raise RuntimeError("a session staged pages of a pair that cannot stage")
            buffer = self._staging.buffers.take()
            if buffer is None:
                return
            self._queue.popleft()
            self._make_staged(endpoint, self._staging, entry, piece, buffer)

    def _make_whole(self, endpoint: Endpoint, entry: _Queued, region: Region) -> None:
        buffer = self._memory.region(
            region.pool_group, region.pool, region.first_slot, region.num_slots
        )
        self._make(endpoint, entry, buffer, lambda end: self._over(entry.session, entry.post, end))

    def _make_staged(
        self, endpoint: Endpoint, staging: PairStaging, entry: _Queued, piece: Staged, buffer: Any
    ) -> None:
        message = buffer[: entry.post.size_bytes]
        if entry.sends:
            try:
                staging.gather(piece, message)
            except ValueError as error:
                staging.buffers.give_back(buffer)
                self._end_unmade(entry, f"gather: {error}")
                return
            self._counters.staged_bytes_total += entry.post.size_bytes
            # The loop does other things between two gathers.
            self._pausing = True
            self._schedule.soon(self._go_on)

        def over(end: Completion) -> None:
            told = self._land(staging, entry, piece, message, end)
            if end.status is PostStatus.LOST:
                before = self._doubtful_bytes
                staging.buffers.doubt(buffer)
                self._counters.staging_bytes_in_doubt += self._doubtful_bytes - before
            else:
                staging.buffers.give_back(buffer)
            self._over(entry.session, entry.post, told)
            self._advance()

        self._make(endpoint, entry, message, over)

    def _land(
        self, staging: PairStaging, entry: _Queued, piece: Staged, message: Any, end: Completion
    ) -> Completion:
        """Bring a message that has arrived to its pages; how its post has ended for the session."""
        if end.status is PostStatus.LOST:
            # The peer may reach the buffer, and the buffer only.
            return Completion(PostStatus.REVOKED, end.reason)
        # A closed session has given its pages back, whatever its posts did afterwards.
        if end.status is not PostStatus.DONE or entry.sends or entry.session.closed:
            return end
        try:
            staging.scatter(piece, message)
        except ValueError as error:
            return Completion(PostStatus.REVOKED, f"scatter: {error}")
        self._counters.staged_bytes_total += entry.post.size_bytes
        return end

    def _go_on(self) -> None:
        self._pausing = False
        self._advance()

    def _make(
        self, endpoint: Endpoint, entry: _Queued, buffer: Any, over: Callable[[Completion], None]
    ) -> None:
        def ended(end: Completion) -> None:
            done = end.status is PostStatus.DONE
            self._clock.end(self._schedule.now_s(), entry.post.size_bytes if done else 0)
            if not self._clock.open:
                self.quiet.set()
            over(end)

        self._clock.begin(self._schedule.now_s())
        self.quiet.clear()
        if entry.sends:
            endpoint.post_send(buffer, entry.tag, ended)
        else:
            endpoint.post_receive(buffer, entry.tag, ended)

    def _end_unmade(self, entry: _Queued, reason: str) -> None:
        end = Completion(PostStatus.REVOKED, reason)
        self._schedule.soon(lambda: self._over(entry.session, entry.post, end))
