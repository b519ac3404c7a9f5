"""The queue of posts of one pair: order, waiting for buffers, and what ends leave behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tests.transfer.agent_rig import ArrayMemory
from tests.transfer.sessions import context_at, generation_at
from tests.transfer.small_plans import MIXED_PLAN
from transfer.agent_counters import TransferCounters
from transfer.outcome import PeerFate, PostStatus
from transfer.pair_posts import PairPosts, Schedule
from transfer.region import Piece, Post, Region, Staged
from transfer.session import Session, SessionState
from transfer.session_commands import PostReceives, PostSends
from transfer.session_events import PeerLost
from transfer.staging_buffers import STAGING_BUFFERS
from transfer.transport import Completion, Ended, Endpoint, Lost, PostedRequest

GROUPS = {0: (64, 16), 1: (32,)}
BLOCK_BYTES = 80
DONE = Completion(PostStatus.DONE)
LOST = Completion(PostStatus.LOST, "gone")
REVOKED = Completion(PostStatus.REVOKED, "cancelled")


@dataclass(eq=False)
class Request(PostedRequest):
    """One posted request, ended by the test."""

    buffer: Any
    tag: int
    end: Ended

    @property
    @override
    def ended(self) -> bool:
        raise NotImplementedError

    @override
    def cancel(self) -> None:
        raise NotImplementedError


class FakeEndpoint(Endpoint):
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.is_alive = True

    @property
    @override
    def alive(self) -> bool:
        return self.is_alive

    @property
    @override
    def lanes(self) -> tuple[str, ...]:
        return ()

    @override
    def on_lost(self, lost: Lost) -> None:
        raise NotImplementedError

    @override
    def post_send(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        self.requests.append(Request(buffer, tag, ended))
        return self.requests[-1]

    @override
    def post_receive(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        return self.post_send(buffer, tag, ended)


@dataclass
class Rig:
    """Posts over a fake endpoint, in turns that the test takes."""

    memory: ArrayMemory = field(default_factory=lambda: ArrayMemory(16, GROUPS))
    endpoint: FakeEndpoint = field(default_factory=FakeEndpoint)
    counters: TransferCounters = field(default_factory=TransferCounters)
    over: list[tuple[int, PostStatus, str]] = field(default_factory=list)
    turns: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for array in self.memory.pools.values():
            array[:] = np.arange(array.size, dtype=np.uint8).reshape(array.shape)
        self.posts = PairPosts(
            plan=MIXED_PLAN,
            memory=self.memory,
            counters=self.counters,
            schedule=Schedule(lambda: 0.0, self.turns.append),
            over=self._over,
        )
        self.sender: Session = context_at(SessionState.SHIPPING)
        self.receiver: Session = generation_at(SessionState.RECEIVING)

    def _over(self, session: Session, post: Post, end: Completion) -> None:
        self.over.append((post.id, end.status, end.reason))

    def send(self, *pieces: Piece) -> None:
        self.posts.add(self.sender, PostSends(1, posts_of(pieces)))

    def receive(self, *pieces: Piece) -> None:
        self.posts.add(self.receiver, PostReceives(1, posts_of(pieces)))

    def run(self) -> None:
        while self.turns:
            self.turns.pop(0)()

    @property
    def requests(self) -> list[Request]:
        return self.endpoint.requests


def staged(*slots: int) -> Staged:
    return Staged(0, np.array(slots, dtype=np.int32))


def whole(first_slot: int) -> Region:
    return Region(1, 0, first_slot, 1)


def posts_of(pieces: tuple[Piece, ...]) -> tuple[Post, ...]:
    sizes = [len(p.slots) * BLOCK_BYTES if isinstance(p, Staged) else 32 for p in pieces]
    return tuple(
        Post(number, piece, size)
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True))
    )


def test_posts_wait_for_the_endpoint() -> None:
    rig = Rig()
    rig.receive(whole(1), staged(2))
    assert not rig.requests
    rig.posts.bind(rig.endpoint)
    assert len(rig.requests) == 2
    assert not rig.posts.quiet.is_set()


def test_a_staged_send_is_gathered_and_a_staged_receive_scattered() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.send(staged(3, 1))
    message = rig.requests[0].buffer
    assert message.shape == (2 * BLOCK_BYTES,)
    # The halves of a slot change places on the way: here in the sender's order.
    expected = [rig.memory.pools[0, pool][[3, 1]].reshape(-1) for pool in (0, 1)]
    assert np.array_equal(message, np.concatenate(expected))
    arrived = message.copy()
    other = Rig()
    other.posts.bind(other.endpoint)
    other.receive(staged(5, 7))
    other.requests[0].buffer[:] = arrived
    before = other.memory.pools[0, 0].copy()
    other.requests[0].end(DONE)
    assert other.over == [(0, PostStatus.DONE, "")]
    for pool, half in ((0, 32), (1, 8)):
        sent = rig.memory.pools[0, pool][[3, 1]]
        got = other.memory.pools[0, pool][[5, 7]]
        assert np.array_equal(got, np.roll(sent, half, axis=1))
    rest = [slot for slot in range(16) if slot not in (5, 7)]
    assert np.array_equal(other.memory.pools[0, 0][rest], before[rest])
    assert other.counters.busy_bytes == 2 * BLOCK_BYTES
    assert other.posts.quiet.is_set()


def test_a_buffer_serves_one_message_at_a_time_and_all_behind_wait() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.receive(*(staged(slot) for slot in range(STAGING_BUFFERS + 1)), whole(3))
    assert len(rig.requests) == STAGING_BUFFERS
    rig.requests[2].end(DONE)
    # The buffer that came back is taken, and then nothing keeps the whole slot waiting.
    assert len(rig.requests) == STAGING_BUFFERS + 2
    buffers = {request.buffer.__array_interface__["data"][0] for request in rig.requests[:-1]}
    assert len(buffers) == STAGING_BUFFERS
    for request in (*rig.requests[:2], *rig.requests[3:]):
        request.end(DONE)
    assert [post for post, _, _ in rig.over] == [2, 0, 1, 3, 4, 5]


def test_gathers_take_turns_with_the_loop() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.send(staged(1), staged(2), whole(3))
    assert len(rig.requests) == 1
    rig.turns.pop(0)()
    assert len(rig.requests) == 2
    rig.run()
    assert len(rig.requests) == 3


@pytest.mark.parametrize("end", [REVOKED, LOST], ids=["revoked", "lost"])
def test_a_staged_receive_that_failed_has_touched_no_page(end: Completion) -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.receive(staged(5))
    before = rig.memory.pools[0, 0].copy()
    rig.requests[0].buffer[:] = 99
    rig.requests[0].end(end)
    assert rig.over == [(0, PostStatus.REVOKED, end.reason)]
    assert np.array_equal(rig.memory.pools[0, 0], before)


def test_whole_slots_that_were_lost_stay_lost() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.receive(whole(5))
    rig.requests[0].end(LOST)
    assert rig.over == [(0, PostStatus.LOST, "gone")]
    assert rig.posts.settled


def test_a_lost_buffer_is_kept_and_not_reused_until_the_peer_is_known_dead() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    for _ in range(STAGING_BUFFERS):
        rig.receive(staged(5))
        rig.requests[-1].end(LOST)
    rig.receive(staged(6))
    assert len(rig.requests) == STAGING_BUFFERS
    assert rig.counters.staging_bytes_in_doubt > 0
    assert not rig.posts.settled
    doubted = [weakref.ref(request.buffer.base) for request in rig.requests]
    rig.requests.clear()
    gc.collect()
    assert all(buffer() is not None for buffer in doubted)
    rig.posts.peer_dead()
    gc.collect()
    assert all(buffer() is None for buffer in doubted)
    assert rig.counters.staging_bytes_in_doubt == 0
    assert rig.posts.settled


def test_nothing_is_scattered_for_a_session_that_has_given_its_pages_back() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.receive(staged(5))
    before = rig.memory.pools[0, 0].copy()
    rig.receiver.handle(PeerLost("killed", PeerFate.DEAD), 1)
    assert rig.receiver.closed
    rig.requests[0].buffer[:] = 99
    rig.requests[0].end(DONE)
    assert np.array_equal(rig.memory.pools[0, 0], before)
    assert rig.posts.settled


def test_after_the_loss_nothing_is_made_and_everything_is_told() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.receive(*(staged(slot) for slot in range(STAGING_BUFFERS + 2)), whole(3))
    rig.endpoint.is_alive = False
    rig.requests[0].end(REVOKED)
    assert len(rig.requests) == STAGING_BUFFERS
    left = rig.posts.withdraw()
    assert [post.id for _, post in left] == [STAGING_BUFFERS, STAGING_BUFFERS + 1, 6]
    rig.receive(whole(4))
    assert len(rig.over) == 1
    rig.run()
    assert rig.over[1:] == [(0, PostStatus.REVOKED, "the peer is lost")]


def test_slots_that_are_not_there_end_their_post() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.send(staged(16), staged(1))
    rig.run()
    assert len(rig.requests) == 1
    ((post, status, reason),) = rig.over
    assert (post, status) == (0, PostStatus.REVOKED)
    assert "pool 0 has 16 slots" in reason
    rig.receive(staged(16))
    rig.requests[1].end(DONE)
    assert rig.over[1][:2] == (0, PostStatus.REVOKED)
