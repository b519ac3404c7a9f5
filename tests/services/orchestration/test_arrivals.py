"""Nobody is sent requests before its transfer pairs are connected, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

from tests.services.orchestration.rig import (
    FAST,
    Rig,
    make_request,
    make_settings,
    oracle,
    pair,
    rig,
    until,
)
from tests.support.fake_worker import FakeScript, FakeWorker
from worker.messages import Generate, Prefill

PATIENT = make_settings(timings=replace(FAST, pairs_s=60.0))
"""Who waits for a pair waits longer than the test."""


async def start(workers: list[FakeWorker], built: Rig) -> None:
    for worker in workers:
        await worker.start()
    await built.service.start()
    built.publish()


async def end(workers: list[FakeWorker], built: Rig) -> None:
    await built.service.close()
    for worker in workers:
        await worker.kill()


async def test_a_generation_worker_is_told_of_every_context_worker_and_of_no_other() -> None:
    workers = [
        FakeWorker("context-0", "context"),
        FakeWorker("context-1", "context"),
        FakeWorker("generation-0", "generation"),
        FakeWorker("aggregated-0", "aggregated"),
    ]
    first, second, generation, aggregated = workers

    def told() -> list[str]:
        return sorted(str(peer.incarnation) for peer in generation.introduced)

    async with rig(workers, PATIENT) as cluster:
        assert told() == sorted(str(worker.incarnation) for worker in (first, second))
        assert not first.introduced
        assert not aggregated.introduced
        cluster.workers.remove(second)
        cluster.publish()
        await until(lambda: told() == [str(first.incarnation)])
        await first.restart()
        cluster.publish()
        await until(lambda: told() == [str(first.incarnation)])
        await until(lambda: cluster.ready_of("context-0"))
        statuses = {status.instance: status for status in cluster.service.readiness().workers}
        assert [pair.lane for pair in statuses["generation-0"].pairs] == ["fake"]


async def test_the_service_starts_when_its_pairs_are_connected() -> None:
    workers = pair(generation=FakeScript(warms=False))
    built = Rig(workers, replace(PATIENT, expected_instances=("context-0", "generation-0")))
    await start(workers, built)
    reason = "instance generation-0 is not connected to context-0: scripted"
    await until(lambda: reason in built.service.readiness().reasons)
    assert not built.service.readiness().ready
    # Whoever came first had nobody to wait for.
    assert not all(built.ready_of(name) for name in ("context-0", "generation-0"))
    assert not any(worker.received for worker in workers)
    workers[1].script.warms = True
    workers[1].tell_gauges()
    await built.ready()
    assert not built.service.readiness().degraded
    await end(workers, built)


async def test_a_pair_that_cannot_be_connected_holds_up_the_start_for_a_while_only() -> None:
    workers = pair(generation=FakeScript(warms=False))
    settings = make_settings(timings=replace(FAST, pairs_s=0.05))
    async with rig(workers, settings) as cluster:
        readiness = cluster.service.readiness()
        assert readiness.ready
        reason = "instance generation-0 is not connected to context-0: scripted"
        assert readiness.degraded == (reason,)
        request = make_request()
        assert (await cluster.run(request)).tokens == oracle(request)


async def test_a_dead_context_worker_is_not_waited_for() -> None:
    workers = pair()
    async with rig(workers, PATIENT) as cluster:
        context, generation = workers
        await context.kill()
        await until(lambda: not cluster.ready_of("context-0"))
        generation.script.warms = False
        await generation.restart()
        cluster.publish()
        await until(lambda: cluster.ready_of("generation-0"))
        assert cluster.service.readiness().ready


async def test_a_returning_worker_gets_requests_when_it_is_connected_and_others_serve() -> None:
    workers = [
        FakeWorker("context-0", "context"),
        FakeWorker("generation-0", "generation"),
        FakeWorker("generation-1", "generation"),
    ]
    async with rig(workers, PATIENT) as cluster:
        returning = workers[2]
        returning.script.warms = False
        await returning.restart()
        cluster.publish()
        await until(lambda: bool(returning.introduced))
        await until(lambda: cluster.state("generation-1") == "live")
        for first in range(4):
            request = make_request(first=100 * first)
            assert (await cluster.run(request)).tokens == oracle(request)
        assert cluster.service.readiness().ready
        assert not cluster.ready_of("generation-1")
        assert not [m for m in returning.received if isinstance(m, Prefill | Generate)]
        returning.script.warms = True
        returning.tell_gauges()
        await until(lambda: cluster.ready_of("generation-1"))


async def test_a_lost_pair_is_told_of_and_takes_nobody_out_of_service() -> None:
    workers = pair()
    async with rig(workers, PATIENT) as cluster:
        workers[1].script.warms = False
        workers[1].tell_gauges()
        await until(lambda: bool(cluster.service.readiness().degraded))
        assert cluster.service.readiness().ready
        assert cluster.ready_of("generation-0")
