"""The canary in virtual time, and over fake workers that are busy, queued or wedged."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from typing_extensions import override

from services.orchestration.api import (
    Completed,
    Failed,
    GenerationRequest,
    OutputEvent,
    OutputStream,
)
from services.orchestration.canary import Canary, CanarySettings, CanaryTarget
from services.orchestration.stream import RequestStream, StreamControl
from tests.services.orchestration.rig import Collected, make_request, make_settings, rig, until
from tests.support.fake_worker import FakeWorker

DONE = Completed(
    prompt_tokens=16,
    cached_tokens=0,
    completion_tokens=(2,),
    transferred_bytes=0,
    repaired=False,
)


class _Selector(selectors.SelectSelector):
    """Never sleeps: the time to wait has passed at once."""

    now_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for ever"
        self.now_s += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    @override
    def time(self) -> float:
        return self.virtual.now_s


class _Service(CanaryTarget, StreamControl):
    """Answers each canary after ``answer_s``; its worker moves until ``moves_until_s``."""

    def __init__(self, answer_s: float, moves_until_s: float, answer: OutputEvent = DONE) -> None:
        self.answer_s = answer_s
        self.moves_until_s = moves_until_s
        self.answer = answer
        self.submitted = 0
        self.cancelled = 0

    @override
    def missing(self) -> tuple[str, ...]:
        return ()

    @override
    def vocab_size(self) -> int:
        return 100

    @override
    async def submit(self, request: GenerationRequest) -> OutputStream:
        self.submitted += 1
        stream = RequestStream(f"r{self.submitted}", self)
        asyncio.get_running_loop().call_later(self.answer_s, stream.push, self.answer)
        return stream

    @override
    def stalled(self, request_id: str, since_s: float) -> tuple[str, ...]:
        return ("worker w makes no progress",) if since_s > self.moves_until_s else ()

    @override
    def stop(self, request_id: str, choice: int, index: int) -> None:
        raise AssertionError("canaries have no stops")

    @override
    def cancel(self, request_id: str) -> None:
        self.cancelled += 1


def story(service: _Service, seconds: int) -> list[str]:
    """The canary's failure at the end of every second."""

    async def watch() -> list[str]:
        canary = Canary(service, CanarySettings())
        canary.start()
        failures = []
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            failures.append(canary.failure)
        await canary.close()
        return failures

    return _run(watch)


def _run(work: Callable[[], Coroutine[Any, Any, list[str]]]) -> list[str]:
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def test_a_canary_that_waits_behind_moving_work_is_no_failure() -> None:
    service = _Service(answer_s=40.5, moves_until_s=1e9)
    failures = story(service, 60)
    assert service.submitted == 1
    assert set(failures[:40]) == {"no request has been served yet"}
    assert set(failures[41:]) == {""}


def test_a_canary_fails_after_a_whole_period_without_progress() -> None:
    service = _Service(answer_s=1e6, moves_until_s=20.0)
    failures = story(service, 40)
    assert "no progress" not in " ".join(failures[:29])
    assert "worker w makes no progress for 10 s" in failures[33]
    assert service.cancelled >= 1


def test_a_service_that_never_answered_a_canary_while_it_moved_keeps_its_last_proof() -> None:
    service = _Service(answer_s=0.5, moves_until_s=1e9)

    async def watch() -> list[str]:
        canary = Canary(service, CanarySettings(patience_s=50))
        canary.start()
        await asyncio.sleep(5)
        service.answer_s = 1e6
        await asyncio.sleep(200)
        failures = [canary.failure]
        await canary.close()
        return failures

    assert _run(watch) == [""]
    assert service.cancelled >= 1


def test_a_canary_that_fails_by_word_is_a_failure_at_once() -> None:
    service = _Service(0.5, 1e9, Failed("worker_failed", "it broke", 500))
    assert "worker_failed: it broke" in story(service, 2)[0]


async def test_a_busy_worker_is_ready_and_a_wedged_one_is_not() -> None:
    worker = FakeWorker("aggregated-0", "aggregated")
    eager = CanarySettings(idle_s=0.05, retry_s=0.02, timeout_s=0.6)
    async with rig([worker], make_settings(canary=eager)) as cluster:
        worker.script.step_s = 0.02
        stream = await cluster.service.submit(make_request(max_tokens=4000))
        reading = asyncio.ensure_future(Collected(1).read(stream))
        await until(lambda: worker.active >= 1)
        worker.script.prefill_s = 3600.0  # whatever comes now waits
        for _ in range(60):
            await asyncio.sleep(0.03)
            readiness = cluster.service.readiness()
            assert readiness.ready, readiness.reasons
        worker.script.decode_gate = asyncio.Event()
        await until(lambda: not cluster.service.readiness().ready)
        assert "aggregated-0" in cluster.service.readiness().reasons[0]
        assert "makes no progress" in cluster.service.readiness().reasons[0]
        worker.script.prefill_s = 0.0
        worker.script.step_s = 0.0
        worker.script.decode_gate.set()
        await cluster.ready()
        await stream.aclose()
        reading.cancel()


async def test_an_instance_that_is_gone_is_named_while_others_of_its_role_serve() -> None:
    workers = [FakeWorker("aggregated-0", "aggregated"), FakeWorker("aggregated-1", "aggregated")]
    async with rig(workers) as cluster:
        await workers[1].kill()
        cluster.service.set_workers([workers[0].address()])
        await until(lambda: bool(cluster.service.readiness().degraded))
        readiness = cluster.service.readiness()
        assert readiness.ready
        assert readiness.degraded == ("instance aggregated-1 is not ready",)
        states = {status.instance: status.state for status in readiness.workers}
        assert states == {"aggregated-0": "live", "aggregated-1": "gone"}
        await workers[1].restart()
        cluster.publish()
        await until(lambda: not cluster.service.readiness().degraded)
        assert all(status.state == "live" for status in cluster.service.readiness().workers)


async def test_a_service_without_one_role_is_ready_and_says_what_is_missing() -> None:
    workers = [FakeWorker("context-0", "context"), FakeWorker("generation-0", "generation")]
    async with rig(workers) as cluster:
        for victim, role in ((0, "context"), (1, "generation")):
            await workers[victim].kill()
            await until(lambda: bool(cluster.service.readiness().degraded))
            readiness = cluster.service.readiness()
            assert readiness.ready
            assert readiness.degraded == (f"no {role} worker is ready",)
            (await cluster.run(make_request(first=victim))).completed()
            await workers[victim].restart()
            cluster.publish()
            await until(lambda: not cluster.service.readiness().degraded)
        for worker in workers:
            await worker.kill()
        await until(lambda: not cluster.service.readiness().ready)
