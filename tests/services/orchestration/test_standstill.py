"""A front end that was stopped or held up: the lost time is its own, not its workers' silence."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.services.orchestration.rig import (
    FAST,
    Collected,
    make_request,
    oracle,
    pair,
    rig,
    until,
)


async def test_a_front_end_that_stood_still_gives_no_worker_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = pair()
    async with rig(workers) as cluster:
        gate = workers[1].script.decode_gate = asyncio.Event()
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        time.sleep(3 * FAST.lost_s)  # noqa: ASYNC251  holds up the event loop on purpose
        await asyncio.sleep(2 * FAST.suspect_s)
        assert cluster.state("generation-0") == "live"
        gate.set()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert not result.completed().repaired
        assert cluster.repairs == 0
    assert "silent" not in caplog.text
