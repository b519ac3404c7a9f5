"""Data endpoints that do not come up, over the real UCX, and when one is up. Budget: 5 s."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.forked import forked
from tests.transfer import ucx_peer, unattachable_peer
from tests.transfer.agent_rig import WAIT_S
from tests.transfer.ucx_peer import OPENING
from transfer.transport import TransportAddress, TransportError
from transfer.ucx.lane_watch import LANES_S, LaneWatch
from transfer.ucx.transport import UcxTransport

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
    assert not watch.stay(FIRST, 10.25)
    assert not watch.stay(FIRST, 10.0 + LANES_S)
    assert watch.stay(FIRST, 10.25 + LANES_S)


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
