"""Data endpoints that do not come up, over the real UCX, and when one is up. Budget: 10 s."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from tests.support.forked import forked
from tests.support.process_facts import ProcessFacts
from tests.transfer import held_dialler, slow_listener, ucx_peer, unattachable_peer
from tests.transfer.agent_rig import WAIT_S
from tests.transfer.ucx_peer import OPENING
from transfer.transport import TransportAddress, TransportError
from transfer.ucx.lane_watch import LANES_S, LaneWatch
from transfer.ucx.same_host import is_here
from transfer.ucx.transport import UcxTransport

HELD_S = 0.5
"""A dialler that connects a lane does so within 50 ms."""
CONNECTION, FIRST, ALL = ("tcp",), ("tcp", "tcp/lo"), ("tcp", "sysv/memory", "tcp/lo")


def test_lanes_stay_when_they_have_changed_twice() -> None:
    watch = LaneWatch(CONNECTION, 0.0)
    assert not watch.stay(CONNECTION, 0.01)
    assert not watch.stay(FIRST, 0.02)
    assert not watch.stay(FIRST, 0.03)
    assert watch.stay(ALL, 0.04)
    assert watch.stay(ALL, 0.05)


def test_lanes_that_no_longer_change_stay_after_a_while() -> None:
    watch = LaneWatch(CONNECTION, 10.0)
    looks = [watch.stay(FIRST, 10.0 + 0.04 * number) for number in range(1, 15)]
    assert looks == [False] * 13 + [True]


def test_lanes_that_nobody_looked_at_may_have_changed() -> None:
    """A process that was stopped has not read yet what came meanwhile."""
    watch = LaneWatch(CONNECTION, 10.0)
    assert not watch.stay(FIRST, 10.01)
    assert not watch.stay(FIRST, 10.01 + 3 * LANES_S)
    assert not watch.stay(FIRST, 10.02 + 3 * LANES_S)


def test_an_address_of_this_host_is_here_and_no_other_is() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")
    assert not is_here("no.such.host.invalid")


@pytest_asyncio.fixture
async def survivor() -> AsyncIterator[UcxTransport]:
    transport = UcxTransport("127.0.0.1")
    await transport.start()
    yield transport
    await transport.close()


@pytest.mark.ucx
async def test_a_listener_whose_memory_cannot_be_attached_fails_the_dial(
    survivor: UcxTransport,
) -> None:
    """A dialler that had said something by then would not be here any more."""
    async with forked(unattachable_peer.main, "listen") as gone:
        _, port = (await gone.line_of("port")).split()
        with pytest.raises(TransportError, match="closed the endpoint or died"):
            await survivor.connect(
                TransportAddress("127.0.0.1", int(port)), OPENING, timeout_s=WAIT_S
            )
    await reaches_another(survivor)


@pytest.mark.ucx
async def test_a_listener_that_stood_still_and_cannot_be_attached_fails_the_dial(
    survivor: UcxTransport,
) -> None:
    """It names its shared memory long after the first lane came up, and is gone by then."""
    async with forked(unattachable_peer.main, "stand_still") as gone:
        _, port = (await gone.line_of("port")).split()
        address = TransportAddress("127.0.0.1", int(port))
        dial = asyncio.ensure_future(survivor.connect(address, OPENING, timeout_s=WAIT_S))
        await gone.line_of("dialled")
        # Other lanes would pass for those that stay by now.
        await asyncio.sleep(LANES_S + 0.2)
        gone.signal(signal.SIGCONT)
        with pytest.raises(TransportError, match="closed the endpoint or died"):
            await dial
    await reaches_another(survivor)


@pytest.mark.ucx
async def test_a_listener_that_dies_between_connecting_and_the_first_bytes_fails_the_dial() -> None:
    """Which side connects the TCP lane is for UCX's port numbers to say."""
    for _ in range(16):
        async with forked(unattachable_peer.main, "stand_still") as gone:
            _, port = (await gone.line_of("port")).split()
            async with forked(held_dialler.main, port, "2") as dialler:
                await gone.line_of("dialled")
                try:
                    await asyncio.wait_for(dialler.line_of("held"), HELD_S)
                except TimeoutError:
                    continue
                gone.signal(signal.SIGKILL)
                assert await gone.exit_code() == -signal.SIGKILL
                dialler.order("go on")
                assert "closed the endpoint or died" in await dialler.line_of("failed")
                assert await dialler.exit_code() == 0
                return
    pytest.fail("no dialler connected a TCP lane by itself")


@pytest.mark.ucx
async def test_a_listener_hears_whoever_has_connected_before_it_goes() -> None:
    """First bytes that came later would be UCX's last."""
    async with forked(slow_listener.main) as listener:
        _, port = (await listener.line_of("port")).split()
        async with forked(held_dialler.main, port, "1") as dialler:
            await dialler.line_of("held")
            listener.order("close")
            await listener.line_of("closed")
            # One that did not wait for whoever is on its way would be gone by now, its worker not.
            await asyncio.sleep(slow_listener.PAUSE_S / 3)
            dialler.order("go on")
            await dialler.line_of("failed")
        listener.order("end")
        await listener.line_of("bye")
        assert await listener.exit_code() == 0


@pytest.mark.ucx
async def test_what_was_given_up_as_it_began_leaves_nothing(survivor: UcxTransport) -> None:
    """Nobody waits for the endpoint or the listener that the driver thread makes all the same."""
    async with forked(ucx_peer.main) as peer:
        _, port = (await peer.line_of("port")).split()
        address = TransportAddress("127.0.0.1", int(port))
        descriptors = ProcessFacts.of(os.getpid()).descriptors
        begun: list[Coroutine[Any, Any, object]] = [survivor.expect(OPENING) for _ in range(4)]
        begun += [survivor.connect(address, OPENING, timeout_s=WAIT_S) for _ in range(4)]
        for work in begun:
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(WAIT_S):
            while ProcessFacts.of(os.getpid()).descriptors > descriptors:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await reaches_another(survivor)


@pytest.mark.ucx
async def test_a_dialler_whose_memory_cannot_be_attached_is_dropped(
    survivor: UcxTransport,
) -> None:
    expectation = await survivor.expect(OPENING)
    port = str(expectation.address.port)
    async with forked(unattachable_peer.main, "dial", port) as gone:
        await gone.line_of("failed")
    assert not expectation.endpoint.done()
    dialler = await survivor.connect(expectation.address, OPENING, timeout_s=WAIT_S)
    listener = await asyncio.wait_for(expectation.endpoint, WAIT_S)
    assert dialler.alive
    assert listener.alive


async def reaches_another(survivor: UcxTransport) -> None:
    """The next peer is connected as ever."""
    async with forked(ucx_peer.main) as peer:
        _, port = (await peer.line_of("port")).split()
        address = TransportAddress("127.0.0.1", int(port))
        endpoint = await survivor.connect(address, OPENING, timeout_s=WAIT_S)
        assert endpoint.alive


async def test_a_peer_for_whom_no_descriptors_are_left_is_refused(survivor: UcxTransport) -> None:
    """UCX would end the process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, before[1]))
    try:
        with pytest.raises(TransportError, match="file descriptors are in use"):
            await survivor.expect(OPENING)
        with pytest.raises(TransportError, match="file descriptors are in use"):
            await survivor.connect(TransportAddress("127.0.0.1", 1), OPENING, timeout_s=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (await survivor.expect(OPENING)).close()
