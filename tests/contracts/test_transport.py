"""What every transport promises. The ``ucx`` arm runs two real transports over loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from transfer.inprocess import Network
from transfer.outcome import PostStatus
from transfer.transport import (
    OPENING_BYTES,
    Completion,
    Endpoint,
    PostedRequest,
    Transport,
    TransportAddress,
    TransportError,
)

OPENING = b"right opening".ljust(OPENING_BYTES, b"-")
WRONG = b"wrong opening".ljust(OPENING_BYTES, b"-")
WAIT_S = 10.0
MIB = 1 << 20


@dataclass
class Pair:
    """Two transports; ``dialler`` has connected to ``listener``."""

    dialler: Transport
    listener: Transport
    near: Endpoint
    """The dialler's end."""
    far: Endpoint
    """The listener's end."""


@dataclass
class Watch:
    """Collects the ending of one request."""

    completions: list[Completion] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, completion: Completion) -> None:
        self.completions.append(completion)
        self.threads.append(threading.get_ident())
        self.done.set()

    async def status(self) -> PostStatus:
        await asyncio.wait_for(self.done.wait(), WAIT_S)
        assert len(self.completions) == 1
        return self.completions[0].status


def make_transports(kind: str) -> tuple[Transport, Transport]:
    if kind == "ucx":
        from transfer.ucx.transport import UcxTransport

        return UcxTransport("127.0.0.1"), UcxTransport("127.0.0.1")
    network = Network(piece_bytes=1 << 12)
    return network.transport("a"), network.transport("b")


@pytest.fixture(params=["inprocess", pytest.param("ucx", marks=pytest.mark.ucx)])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    dialler, listener = make_transports(request.param)
    await dialler.start()
    await listener.start()
    expectation = await listener.expect(OPENING)
    near = await dialler.connect(expectation.address, OPENING, timeout_s=WAIT_S)
    far = await expectation.endpoint
    yield Pair(dialler, listener, near, far)
    await dialler.close()
    await listener.close()


def noise(size_bytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def send(pair: Pair, data: npt.NDArray[np.uint8], tag: int) -> Watch:
    watch = Watch()
    pair.near.post_send(data, tag, watch)
    return watch


def receive(pair: Pair, data: npt.NDArray[np.uint8], tag: int) -> tuple[Watch, PostedRequest]:
    watch = Watch()
    return watch, pair.far.post_receive(data, tag, watch)


@pytest.mark.parametrize("size_bytes", [1, 4096, 9999, MIB + 1, 16 * MIB])
async def test_bytes_arrive_whichever_side_posts_first(pair: Pair, size_bytes: int) -> None:
    for receiver_first in (True, False):
        data = noise(size_bytes, seed=int(receiver_first))
        into = np.zeros(size_bytes, np.uint8)
        if receiver_first:
            received, _ = receive(pair, into, 7)
            sent = send(pair, data, 7)
        else:
            sent = send(pair, data, 7)
            received, _ = receive(pair, into, 7)
        assert await received.status() is PostStatus.DONE
        assert await sent.status() is PostStatus.DONE
        assert np.array_equal(into, data)


async def test_both_directions_at_once(pair: Pair) -> None:
    there, back = noise(MIB, 1), noise(MIB, 2)
    into_far, into_near = np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)
    watches = [Watch() for _ in range(4)]
    pair.far.post_receive(into_far, 1, watches[0])
    pair.near.post_receive(into_near, 1, watches[1])
    pair.near.post_send(there, 1, watches[2])
    pair.far.post_send(back, 1, watches[3])
    assert [await watch.status() for watch in watches] == [PostStatus.DONE] * 4
    assert np.array_equal(into_far, there)
    assert np.array_equal(into_near, back)


async def test_one_tag_matches_in_order_of_posting(pair: Pair) -> None:
    sizes = [(97 * n) % 30_000 + 1 for n in range(200)]
    data = [noise(size, seed=n) for n, size in enumerate(sizes)]
    into = [np.zeros(size, np.uint8) for size in sizes]
    sent = [send(pair, part, 3) for part in data]
    received = [receive(pair, part, 3)[0] for part in into]
    for watch in (*received, *sent):
        assert await watch.status() is PostStatus.DONE
    assert all(np.array_equal(a, b) for a, b in zip(data, into, strict=True))


async def test_tags_do_not_mix(pair: Pair) -> None:
    high = (1 << 64) - 1
    low_data, high_data = noise(1000, 1), noise(1000, 2)
    low_into, high_into = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    high_watch, _ = receive(pair, high_into, high)
    low_watch, _ = receive(pair, low_into, 0)
    send(pair, low_data, 0)
    send(pair, high_data, high)
    assert await low_watch.status() is PostStatus.DONE
    assert await high_watch.status() is PostStatus.DONE
    assert np.array_equal(low_into, low_data)
    assert np.array_equal(high_into, high_data)


async def test_cancelled_before_matching_writes_nothing(pair: Pair) -> None:
    first, second = np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)
    cancelled, request = receive(pair, first, 5)
    request.cancel()
    request.cancel()
    assert await cancelled.status() is PostStatus.REVOKED
    assert request.ended
    data = noise(MIB)
    received, _ = receive(pair, second, 5)
    send(pair, data, 5)
    assert await received.status() is PostStatus.DONE
    assert np.array_equal(second, data)
    assert not first.any()


async def test_cancelled_after_matching_ends_only_when_nothing_more_is_written(pair: Pair) -> None:
    size_bytes = 64 * MIB
    into = np.zeros(size_bytes, np.uint8)
    data = np.ones(size_bytes, np.uint8)
    sent = send(pair, data, 5)
    received, request = receive(pair, into, 5)
    while not into[0] and not request.ended:  # noqa: ASYNC110 (memory raises no event)
        await asyncio.sleep(0)
    request.cancel()
    status = await received.status()
    written = int(np.count_nonzero(into))
    assert status is PostStatus.DONE
    assert written == size_bytes
    assert await sent.status() is PostStatus.DONE
    # The pages are used again: bytes of the cancelled message must not come any more.
    into[:] = 9
    other = np.zeros(MIB, np.uint8)
    again, _ = receive(pair, other, 6)
    send(pair, noise(MIB), 6)
    assert await again.status() is PostStatus.DONE
    assert int(into.min()) == int(into.max()) == 9


async def test_a_message_longer_than_its_buffer_is_not_done(pair: Pair) -> None:
    into = np.zeros(100, np.uint8)
    received, _ = receive(pair, into, 5)
    send(pair, noise(200), 5)
    assert await received.status() is PostStatus.REVOKED


async def test_buffers_must_be_contiguous(pair: Pair) -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        pair.near.post_send(np.zeros((8, 8), np.uint8)[:, ::2], 1, Watch())
    with pytest.raises(ValueError, match="C-contiguous"):
        pair.far.post_receive(np.zeros((8, 8), np.uint8).T, 1, Watch())


async def test_tags_have_64_bits(pair: Pair) -> None:
    for tag in (-1, 1 << 64):
        with pytest.raises(ValueError, match="tag"):
            pair.near.post_send(noise(10), tag, Watch())
        with pytest.raises(ValueError, match="tag"):
            pair.near.post_receive(noise(10), tag, Watch())


async def test_callbacks_run_in_the_loops_thread(pair: Pair) -> None:
    received, _ = receive(pair, np.zeros(10, np.uint8), 1)
    sent = send(pair, noise(10), 1)
    await received.status()
    await sent.status()
    assert {*received.threads, *sent.threads} == {threading.get_ident()}


async def test_closing_ends_everything_on_both_sides(pair: Pair) -> None:
    lost: list[str] = []
    both = asyncio.Event()

    def note(reason: str) -> None:
        lost.append(reason)
        if len(lost) == 2:
            both.set()

    pair.near.on_lost(note)
    pair.far.on_lost(note)
    theirs, _ = receive(pair, np.zeros(100, np.uint8), 1)
    mine = Watch()
    pair.near.post_receive(np.zeros(100, np.uint8), 2, mine)
    await pair.dialler.close_endpoint(pair.near)
    await pair.dialler.close_endpoint(pair.near)
    assert await mine.status() is not PostStatus.DONE
    assert await theirs.status() is not PostStatus.DONE
    await asyncio.wait_for(both.wait(), WAIT_S)
    assert not pair.near.alive
    assert not pair.far.alive
    late = Watch()
    pair.far.on_lost(lambda reason: late(Completion(PostStatus.LOST, reason)))
    assert await late.status() is PostStatus.LOST


async def test_posting_on_a_dead_endpoint_ends_at_once(pair: Pair) -> None:
    gone = asyncio.Event()
    pair.near.on_lost(lambda reason: gone.set())
    await pair.listener.close_endpoint(pair.far)
    await asyncio.wait_for(gone.wait(), WAIT_S)
    sent, received = Watch(), Watch()
    pair.near.post_send(noise(100), 1, sent)
    pair.near.post_receive(np.zeros(100, np.uint8), 1, received)
    assert await sent.status() is PostStatus.REVOKED
    assert await received.status() is PostStatus.REVOKED


async def test_a_wrong_opening_is_refused_and_the_right_one_still_expected(pair: Pair) -> None:
    expectation = await pair.listener.expect(OPENING)
    for _ in range(3):
        with pytest.raises(TransportError):
            await pair.dialler.connect(expectation.address, WRONG, timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="opening"):
        await pair.dialler.connect(expectation.address, b"short", timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="opening"):
        await pair.listener.expect(b"short")
    assert not expectation.endpoint.done()
    near = await pair.dialler.connect(expectation.address, OPENING, timeout_s=WAIT_S)
    assert near.alive
    assert (await expectation.endpoint).alive
    # The first pair is another matter.
    received, _ = receive(pair, np.zeros(10, np.uint8), 1)
    send(pair, noise(10), 1)
    assert await received.status() is PostStatus.DONE


async def test_only_one_dialler_is_expected(pair: Pair) -> None:
    expectation = await pair.listener.expect(OPENING)
    await pair.dialler.connect(expectation.address, OPENING, timeout_s=WAIT_S)
    with pytest.raises(TransportError):
        await pair.dialler.connect(expectation.address, OPENING, timeout_s=2)


async def test_an_expectation_may_be_given_up(pair: Pair) -> None:
    expectation = await pair.listener.expect(OPENING)
    expectation.close()
    expectation.close()
    assert expectation.endpoint.cancelled()
    with pytest.raises(TransportError):
        await pair.dialler.connect(expectation.address, OPENING, timeout_s=2)


async def test_pairs_are_independent(pair: Pair) -> None:
    """Closing one pair, and all its requests, leaves another one of the same two transports."""
    expectation = await pair.listener.expect(OPENING)
    near = await pair.dialler.connect(expectation.address, OPENING, timeout_s=WAIT_S)
    far = await expectation.endpoint
    waiting = Watch()
    far.post_receive(np.zeros(10, np.uint8), 1, waiting)
    gone, _ = receive(pair, np.zeros(10, np.uint8), 1)
    await pair.dialler.close_endpoint(pair.near)
    assert await gone.status() is not PostStatus.DONE
    assert not waiting.completions
    sent = Watch()
    near.post_send(noise(10), 1, sent)
    assert await waiting.status() is PostStatus.DONE
    assert await sent.status() is PostStatus.DONE


async def test_nobody_listening_is_an_error_in_time(pair: Pair) -> None:
    address = await closed_address(pair)
    with pytest.raises(TransportError):
        await pair.dialler.connect(address, OPENING, timeout_s=2)


async def closed_address(pair: Pair) -> TransportAddress:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return TransportAddress("127.0.0.1", port)


async def test_lanes_and_facts_are_told(pair: Pair) -> None:
    assert pair.near.lanes
    assert pair.far.lanes
    facts = pair.dialler.facts()
    assert facts.kind
    assert facts.available
    assert pair.dialler.failure == ""


async def test_closing_the_transport_ends_pending_requests(pair: Pair) -> None:
    waiting, _ = receive(pair, np.zeros(100, np.uint8), 1)
    await pair.listener.close()
    await pair.listener.close()
    assert await waiting.status() is not PostStatus.DONE
    gone = asyncio.Event()
    pair.near.on_lost(lambda reason: gone.set())
    await asyncio.wait_for(gone.wait(), WAIT_S)
