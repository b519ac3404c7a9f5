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

from tests.sim.transfer_pages import MIXED_PLAN
from tests.transfer.agent_rig import ArrayMemory
from tests.transfer.page_values import Bytes
from tests.transfer.sessions import context_at, generation_at
from transfer.agent_counters import TransferCounters
from transfer.copy_plan import CopyPlan, Slots
from transfer.host_copies import HostCopies
from transfer.outcome import PeerFate, PostStatus
from transfer.page_staging import PageStaging
from transfer.pair_posts import PairPosts, Schedule
from transfer.passes import PassOver
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


class SlowMemory(ArrayMemory, PageStaging):
    """Passes that the test ends; what they copy, and whether they fail, shows then."""

    def __init__(self) -> None:
        super().__init__(16, GROUPS)
        self.passes: list[Callable[[str], None]] = []

    @property
    @override
    def staging(self) -> PageStaging:
        return self

    @property
    @override
    def message_bytes(self) -> int:
        return MIXED_PLAN.message_bytes

    @override
    def message(self, size_bytes: int) -> Bytes:
        return np.empty(size_bytes, np.uint8)

    @override
    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: Bytes, over: PassOver
    ) -> None:
        self._begin("gather", plan, pool_group, slots, message, over)

    @override
    def scatter(
        self, plan: CopyPlan, message: Bytes, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        self._begin("scatter", plan, pool_group, slots, message, over)

    def _begin(
        self,
        way: str,
        plan: CopyPlan,
        pool_group: int,
        slots: Slots,
        message: Bytes,
        over: PassOver,
    ) -> None:
        pools = [self.pools[pool_group, pool] for pool in range(len(GROUPS[pool_group]))]

        def end(failure: str) -> None:
            if failure:
                pass
            elif way == "gather":
                HostCopies().gather(plan, pools, slots, message)
            else:
                HostCopies().scatter(plan, message, pools, slots)
            over(failure)

        self.passes.append(end)


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
    sizes = [
        len(p.slots) * MIXED_PLAN.groups[p.group].block_bytes if isinstance(p, Staged) else 32
        for p in pieces
    ]
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


def slow() -> tuple[Rig, list[Callable[[str], None]]]:
    """A bound rig whose passes the test ends."""
    memory = SlowMemory()
    rig = Rig(memory)
    rig.posts.bind(rig.endpoint)
    return rig, memory.passes


def test_gathers_run_ahead_and_their_posts_keep_the_order() -> None:
    rig, passes = slow()
    rig.send(staged(1), staged(2), whole(3), staged(4))
    assert (len(passes), len(rig.requests)) == (2, 0)
    assert not rig.posts.quiet.is_set()
    passes[1]("")
    assert not rig.requests
    passes[0]("")
    # Both gathered messages, the whole slot behind them, and the next gather.
    sent = [request.buffer.tobytes() for request in rig.requests]
    assert sent[0][:32] == rig.memory.pools[0, 0][1, :32].tobytes()
    assert sent[1][:32] == rig.memory.pools[0, 0][2, :32].tobytes()
    assert sent[2] == rig.memory.pools[1, 0][3].tobytes()
    assert (len(rig.requests), len(passes)) == (3, 3)
    passes[2]("")
    assert len(rig.requests) == 4
    assert not rig.over


def test_a_receive_is_over_when_it_is_scattered() -> None:
    rig, passes = slow()
    rig.receive(staged(5))
    rig.requests[0].buffer[:] = 99
    rig.requests[0].end(DONE)
    assert not rig.over
    assert not rig.posts.quiet.is_set()
    assert not rig.posts.settled
    passes[0]("")
    assert rig.over == [(0, PostStatus.DONE, "")]
    assert (rig.memory.pools[0, 0][5] == 99).all()
    assert rig.posts.quiet.is_set()
    assert rig.posts.settled


def test_a_buffer_is_not_lent_before_its_message_is_scattered() -> None:
    rig, passes = slow()
    rig.receive(*(staged(slot) for slot in range(STAGING_BUFFERS + 1)))
    rig.requests[0].end(DONE)
    assert len(rig.requests) == STAGING_BUFFERS
    passes[0]("")
    assert len(rig.requests) == STAGING_BUFFERS + 1


@pytest.mark.parametrize("sends", [True, False], ids=["gather", "scatter"])
def test_a_pass_that_fails_ends_its_post(sends: bool) -> None:  # noqa: FBT001 (a parameter)
    rig, passes = slow()
    if sends:
        rig.send(staged(5), staged(6))
        passes[1]("")
    else:
        rig.receive(staged(5))
        rig.requests[0].end(DONE)
    passes[0]("the device is gone")
    rig.run()
    ((post, status, reason),) = rig.over
    assert (post, status) == (0, PostStatus.REVOKED)
    assert "the device is gone" in reason
    assert len(rig.requests) == 1
    assert rig.posts.quiet.is_set() is not sends


def test_what_is_being_gathered_when_the_peer_is_lost_ends_with_its_pass() -> None:
    rig, passes = slow()
    rig.send(*(staged(slot) for slot in range(STAGING_BUFFERS + 1)))
    rig.endpoint.is_alive = False
    assert [post.id for _, post in rig.posts.withdraw()] == [STAGING_BUFFERS]
    rig.run()
    assert not rig.over
    for end in passes:
        end("")
    rig.run()
    assert [post for post, _, _ in rig.over] == list(range(STAGING_BUFFERS))
    assert {status for _, status, _ in rig.over} == {PostStatus.REVOKED}
    assert not rig.requests
    assert rig.posts.settled


def test_nobody_is_told_that_pages_are_free_in_the_middle_of_a_pass() -> None:
    rig, passes = slow()
    told: list[int] = []
    rig.posts.when_still(lambda: told.append(len(rig.over)))
    assert told == [0]
    rig.receive(staged(5), staged(6))
    for request in rig.requests:
        request.end(DONE)
    rig.posts.when_still(lambda: told.append(len(rig.over)))
    rig.send(staged(7))
    passes[0]("")
    assert told == [0]
    assert len(passes) == 2
    passes[1]("")
    # Told once every pass is over, and before the next begins.
    assert told == [0, 2]
    assert len(passes) == 3


class ShortMemory(SlowMemory):
    """Memory for so many buffers."""

    room = 0

    @override
    def message(self, size_bytes: int) -> Bytes:
        if not self.room:
            raise MemoryError(f"expected {size_bytes} free bytes")
        self.room -= 1
        return super().message(size_bytes)


def test_no_memory_for_a_buffer_ends_the_post() -> None:
    memory = ShortMemory()
    rig = Rig(memory)
    rig.posts.bind(rig.endpoint)
    rig.receive(staged(1), whole(2))
    assert len(rig.requests) == 1
    rig.run()
    ((post, status, reason),) = rig.over
    assert (post, status) == (0, PostStatus.REVOKED)
    assert "free bytes" in reason
    memory.room = 1
    for _ in range(STAGING_BUFFERS):
        rig.receive(staged(1))
    assert len(rig.requests) == 2


def test_with_memory_for_one_buffer_posts_take_turns() -> None:
    memory = ShortMemory()
    memory.room = 1
    rig = Rig(memory)
    rig.posts.bind(rig.endpoint)
    rig.receive(staged(1), staged(2), staged(3))
    for number in range(3):
        assert len(rig.requests) == number + 1
        rig.requests[number].end(DONE)
        memory.passes[number]("")
    assert [(post, status) for post, status, _ in rig.over] == [
        (number, PostStatus.DONE) for number in range(3)
    ]
