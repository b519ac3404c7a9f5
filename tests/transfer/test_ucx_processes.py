"""Two processes over the real UCX: speed, sleep, death, cancellation. Budget of the file: 20 s."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.forked import WAIT_S, Forked, forked
from tests.support.process_facts import ProcessFacts
from tests.transfer.ucx_peer import OPENING
from tests.transfer.ucx_peer import main as peer_main
from transfer.outcome import PostStatus
from transfer.transport import (
    Completion,
    Endpoint,
    PostedRequest,
    TransportAddress,
    TransportRequirementError,
    lane_kinds,
)
from transfer.ucx.endpoint import UcxEndpoint
from transfer.ucx.transport import UcxTransport

pytestmark = pytest.mark.ucx
MIB = 1 << 20
SPARE_DESCRIPTORS = 4
"""Of the test's own: the channel of the last process."""


@asynccontextmanager
async def peer_process(**environment: str) -> AsyncIterator[tuple[Forked, TransportAddress]]:
    """A running :class:`tests.transfer.ucx_peer.Peer`."""
    async with forked(peer_main, environment=environment) as peer:
        word, port = (await peer.line()).split()
        assert word == "port"
        yield peer, TransportAddress("127.0.0.1", int(port))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Forked, UcxTransport, Endpoint]]:
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    try:
        async with peer_process() as (peer, address):
            yield peer, transport, await transport.connect(address, OPENING, timeout_s=WAIT_S)
    finally:
        await transport.close()


class Posted:
    """A posted request whose end can be awaited."""

    def __init__(self) -> None:
        self._future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.request: PostedRequest | None = None

    def __call__(self, completion: Completion) -> None:
        self._future.set_result(completion)

    async def end(self) -> Completion:
        return await asyncio.wait_for(self._future, WAIT_S)

    @property
    def ended(self) -> bool:
        return self._future.done()


def receive(endpoint: Endpoint, into: npt.NDArray[np.uint8], tag: int) -> Posted:
    posted = Posted()
    posted.request = endpoint.post_receive(into, tag, posted)
    return posted


def send(endpoint: Endpoint, data: npt.NDArray[np.uint8], tag: int) -> Posted:
    posted = Posted()
    posted.request = endpoint.post_send(data, tag, posted)
    return posted


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():  # memory raises no event
        assert time.monotonic() < end
        await asyncio.sleep(0)


async def test_two_processes_of_one_host_use_shared_memory() -> None:
    async with connected() as (peer, transport, endpoint):
        assert "shm" in lane_kinds(endpoint.lanes), endpoint.lanes
        facts = transport.facts()
        assert facts.library.endswith(".so") or ".so." in facts.library
        assert facts.version.count(".") == 2
        peer.order("quit")
        assert [await peer.line(), await peer.line()] == ["lost closed here", "bye"]
        assert await peer.exit_code() == 0


async def test_thousands_of_small_messages_and_large_ones() -> None:
    async with connected() as (peer, _, endpoint):
        count, size_bytes = 2000, 4096
        small = [np.zeros(size_bytes, np.uint8) for _ in range(count)]
        started = time.perf_counter()
        posted = [receive(endpoint, into, 7) for into in small]
        for number in range(count):
            peer.order(f"send 7 {size_bytes} {number % 251}")
        ends = [await one.end() for one in posted]
        print(f"{count} messages of 4 KiB: {time.perf_counter() - started:.2f} s")
        assert {end.status for end in ends} == {PostStatus.DONE}
        values = [int(into[0]) for into in small]
        assert values == [number % 251 for number in range(count)]
        assert all(int(into.min()) == int(into.max()) for into in small)
        for _ in range(count):
            assert await peer.line() == "sent done"
        large = [np.zeros(64 * MIB, np.uint8) for _ in range(4)]
        posted = [receive(endpoint, into, 8) for into in large]
        started = time.perf_counter()
        for number in range(4):
            peer.order(f"send 8 {64 * MIB} {number + 1}")
        for number, one in enumerate(posted):
            assert (await one.end()).status is PostStatus.DONE
            assert int(large[number].min()) == int(large[number].max()) == number + 1
        seconds = time.perf_counter() - started
        print(f"4 messages of 64 MiB: {4 * 64 * MIB / seconds / 1e9:.2f} GB/s with filling")


async def test_the_driver_sleeps_idle_and_with_a_pending_receive() -> None:
    async with connected() as (_, transport, endpoint):
        before = transport.driver_cpu_seconds()
        await asyncio.sleep(1.0)
        idle = transport.driver_cpu_seconds() - before
        pending = receive(endpoint, np.zeros(MIB, np.uint8), 1)
        before = transport.driver_cpu_seconds()
        await asyncio.sleep(1.0)
        waiting = transport.driver_cpu_seconds() - before
        print(f"driver CPU over 1 s: idle {idle * 100:.3f} %, pending {waiting * 100:.3f} %")
        assert not pending.ended
        assert idle < 0.05
        assert waiting < 0.05


async def test_peer_killed_idle_ends_a_pending_receive() -> None:
    async with connected() as (peer, transport, endpoint):
        lost = asyncio.Event()
        endpoint.on_lost(lambda reason: lost.set())
        pending = receive(endpoint, np.zeros(MIB, np.uint8), 1)
        peer.signal(signal.SIGKILL)
        assert (await pending.end()).status is PostStatus.REVOKED
        await asyncio.wait_for(lost.wait(), WAIT_S)
        assert not endpoint.alive
        assert transport.failure == ""


async def test_sender_killed_in_mid_transfer() -> None:
    async with connected() as (peer, _, endpoint):
        size_bytes = 128 * MIB
        buffer = np.zeros(size_bytes, np.uint8)
        under_way = receive(endpoint, buffer, 2)
        waiting = receive(endpoint, np.zeros(MIB, np.uint8), 2)
        peer.order(f"send 2 {size_bytes} 1")
        await until(lambda: bool(buffer[MIB]))
        peer.signal(signal.SIGKILL)
        end = await under_way.end()
        assert (await waiting.end()).status is PostStatus.REVOKED
        written = int(np.count_nonzero(buffer[::4096]))
        print(f"pages of 4 KiB written before the kill: {written} of {size_bytes >> 12}")
        assert end.status is PostStatus.REVOKED or written == size_bytes >> 12
        buffer[:] = 0
        await asyncio.sleep(0.3)
        assert not buffer[::4096].any(), "bytes landed after the request had ended"
    async with connected() as (_, _, endpoint):
        assert endpoint.alive


async def test_peers_killed_in_mid_transfer_break_nothing_for_the_next() -> None:
    """A killed sender can leave a hole in the queue of the worker it sent to."""
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    buffer = np.zeros(32 * MIB, np.uint8)
    for _ in range(8):
        async with peer_process() as (peer, address):
            endpoint = await transport.connect(address, OPENING, timeout_s=WAIT_S)
            small = receive(endpoint, np.zeros(4096, np.uint8), 1)
            peer.order("send 1 4096 3")
            assert (await small.end()).status is PostStatus.DONE
            buffer[:] = 0
            large = receive(endpoint, buffer, 2)
            peer.order(f"send 2 {len(buffer)} 1")
            await until(lambda: bool(buffer[MIB]))
            peer.signal(signal.SIGKILL)
            await large.end()
    await transport.close()


async def test_sender_killed_within_a_message_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ucxx would wait for the rest of it when it destroys the worker."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
    async with connected() as (peer, transport, endpoint):
        assert isinstance(endpoint, UcxEndpoint)
        lost = asyncio.Event()
        endpoint.on_lost(lambda reason: lost.set())
        peer.order(f"send 9 {256 * MIB} 1")
        await leftover_begun(transport, endpoint)
        peer.signal(signal.SIGKILL)
        await asyncio.wait_for(lost.wait(), WAIT_S)
        await asyncio.wait_for(transport.close_endpoint(endpoint), WAIT_S)
        async with peer_process() as (_, address):
            assert (await transport.connect(address, OPENING, timeout_s=WAIT_S)).alive


@pytest.mark.parametrize("how", ["killed", "stopped", "closed"])
async def test_a_receive_of_which_a_part_has_come_ends_with_its_endpoint(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """UCX itself would wait for the rest of it for ever, and write it if it came."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
    # Lanes of which this process's own progress moves every byte.
    monkeypatch.setenv("UCX_TLS", "self,tcp,sysv")
    async with connected() as (peer, transport, endpoint):
        buffer = np.zeros(256 * MIB, np.uint8)
        posted = receive(endpoint, buffer, 2)
        peer.order(f"send 2 {len(buffer)} 1")
        await until(lambda: bool(buffer[0]))
        if how == "killed":
            peer.signal(signal.SIGKILL)
        elif how == "closed":
            peer.order("close")
        else:
            peer.signal(signal.SIGSTOP)
            await transport.close_endpoint(endpoint)
        assert (await posted.end()).status is PostStatus.REVOKED
        assert not buffer[-1]
        buffer[:] = 0
        if how == "stopped":
            peer.signal(signal.SIGCONT)
            assert (await peer.line()).startswith(("lost", "sent"))
        await asyncio.sleep(0.1)
        assert not buffer[::4096].any(), "bytes landed after the request had ended"
        assert transport.failure == ""
        async with peer_process() as (_, address):
            assert (await transport.connect(address, OPENING, timeout_s=WAIT_S)).alive


async def leftover_begun(transport: UcxTransport, endpoint: UcxEndpoint) -> None:
    """The first bytes of a message that nobody waits for are here."""
    driver = transport._driver
    end = time.monotonic() + WAIT_S
    found = False
    while not found:
        assert time.monotonic() < end
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def look(answer: asyncio.Future[bool] = answer) -> None:
            driver.answer(answer, driver.has_leftover(endpoint.unit))

        driver.submit(look)
        found = await answer


async def test_receiver_killed_while_we_send() -> None:
    async with connected() as (peer, transport, endpoint):
        first = send(endpoint, np.zeros(16 * MIB, np.uint8), 2)
        waiting = send(endpoint, np.zeros(16 * MIB, np.uint8), 2)
        peer.order(f"receive 2 {16 * MIB}")
        assert (await first.end()).status is PostStatus.DONE
        assert not waiting.ended
        peer.signal(signal.SIGKILL)
        assert (await waiting.end()).status is PostStatus.REVOKED
        assert transport.failure == ""


async def test_cancelled_receive_is_clean_after_its_end() -> None:
    async with connected() as (peer, _, endpoint):
        size_bytes = 128 * MIB
        into = np.zeros(size_bytes, np.uint8)
        posted = receive(endpoint, into, 3)
        peer.order(f"send 3 {size_bytes} 1")
        await until(lambda: bool(into[0]))
        assert posted.request is not None
        posted.request.cancel()
        assert not posted.ended
        at_cancel = int(np.count_nonzero(into[::4096]))
        end = await posted.end()
        at_end = int(np.count_nonzero(into[::4096]))
        print(f"pages at cancel {at_cancel}, at the end {at_end} of {size_bytes >> 12}")
        assert end.status is PostStatus.DONE
        into[:] = 0
        again = np.zeros(MIB, np.uint8)
        other = receive(endpoint, again, 4)
        peer.order(f"send 4 {MIB} 2")
        assert (await other.end()).status is PostStatus.DONE
        assert not into.any()


async def test_a_stopped_peer_ends_nothing_until_the_endpoint_is_closed_here() -> None:
    async with connected() as (peer, transport, endpoint):
        pending = receive(endpoint, np.zeros(MIB, np.uint8), 5)
        peer.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert not pending.ended
        await transport.close_endpoint(endpoint)
        assert (await pending.end()).status is PostStatus.REVOKED
        peer.signal(signal.SIGCONT)
        assert (await peer.line()).startswith("lost")


@pytest.mark.parametrize("direction", ["receive", "send"])
async def test_an_endpoint_closed_with_a_message_under_way_lets_go_of_all_it_had(
    direction: str,
) -> None:
    """Its UCX worker, with a dozen descriptors and the shared memory of both sides."""
    size_bytes = 128 * MIB
    buffer = np.zeros(size_bytes, np.uint8)
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    before = ProcessFacts.of(os.getpid())
    for _ in range(3):
        async with peer_process() as (peer, address):
            endpoint = await transport.connect(address, OPENING, timeout_s=WAIT_S)
            if direction == "receive":
                buffer[:] = 0
                posted = receive(endpoint, buffer, 2)
                peer.order(f"send 2 {size_bytes} 1")
                await until(lambda: bool(buffer[MIB]))
                peer.signal(signal.SIGSTOP)
            else:
                peer.signal(signal.SIGSTOP)
                posted = send(endpoint, buffer, 2)
            await transport.close_endpoint(endpoint)
            await posted.end()
    await until(lambda: ProcessFacts.of(os.getpid()).shared_segments <= before.shared_segments)
    assert ProcessFacts.of(os.getpid()).descriptors <= before.descriptors + SPARE_DESCRIPTORS
    await transport.close()


async def test_peer_that_closes_is_told_apart_from_nothing() -> None:
    async with connected() as (peer, _, endpoint):
        pending = receive(endpoint, np.zeros(MIB, np.uint8), 5)
        peer.order("close")
        assert (await pending.end()).status is PostStatus.REVOKED


async def test_a_required_transport_is_not_replaced_silently() -> None:
    with pytest.raises(TransportRequirementError, match="warp_drive"):
        await UcxTransport("127.0.0.1", require_transport="warp_drive").start()
    transport = UcxTransport("127.0.0.1", require_transport="shm")
    await transport.start()
    async with peer_process(UCX_TLS="tcp") as (_, address):
        with pytest.raises(TransportRequirementError, match="shm"):
            await transport.connect(address, OPENING, timeout_s=WAIT_S)
    async with peer_process() as (_, address):
        endpoint = await transport.connect(address, OPENING, timeout_s=WAIT_S)
        assert "shm" in lane_kinds(endpoint.lanes)
    await transport.close()


async def test_a_process_that_forgets_to_close_still_exits() -> None:
    code = (
        "import asyncio\n"
        "from transfer.ucx.transport import UcxTransport\n"
        "async def main():\n"
        "    t = UcxTransport('127.0.0.1'); await t.start()\n"
        "    await t.expect(bytes(32)); print('up')\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert out == b"up\n"
    assert process.returncode == 0
