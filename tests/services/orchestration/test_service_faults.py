"""Lost workers, failing legs, cancellation, deadlines and overload, over real TCP connections."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.orchestration.api import InvalidRequest, NotReady, Overloaded, TokenDelta
from services.orchestration.canary import CanarySettings
from tests.services.orchestration.rig import (
    Collected,
    Rig,
    make_request,
    make_settings,
    oracle,
    pair,
    rig,
    until,
)
from tests.support.fake_worker import FakeScript, FakeTransfers, FakeWorker
from worker.messages import Cancel, Generate, LegEnded, Prefill, Stop


def bad_end(outcome: str, code: str, *, retryable: bool) -> LegEnded:
    return LegEnded.model_validate(
        {
            "request_id": "",
            "leg": "context",
            "outcome": outcome,
            "code": code,
            "message": f"scripted {code}",
            "retryable": retryable,
        }
    )


async def test_context_killed_after_token_one_is_repaired_with_the_emitted_tokens() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        context, generation = workers
        generation.transfers = FakeTransfers()  # the pages never arrive
        context.script.linger_s = 60.0  # nor does the context leg get to its end
        request = make_request(max_tokens=6)
        stream = await cluster.service.submit(request)
        first = await anext(aiter(stream))
        assert isinstance(first, TokenDelta)
        await context.kill()
        result = Collected(1)
        result.tokens[0].extend(first.tokens)
        await result.read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired
        assert cluster.metric("pageferry_repairs_total", cause="context_lost") == 1
        repair = cluster.received(Generate)[-1]
        assert repair.source is None
        assert len(repair.emitted[0]) == 4
        assert repair.request_id == f"{stream.request_id}.1"
        cancels = [m.request_id for m in generation.received if isinstance(m, Cancel)]
        assert cancels == [stream.request_id]


async def test_context_killed_before_token_one_is_prefilled_on_the_generation_worker() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[0].script.prefill_s = 60.0
        request = make_request(max_tokens=3)
        stream = await cluster.service.submit(request)
        await until(lambda: bool(cluster.received(Prefill)))
        await workers[0].kill()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired


async def test_context_killed_after_the_hand_over_changes_nothing() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        gate = asyncio.Event()
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        workers[1].script.decode_gate = gate
        await until(lambda: workers[0].active == 0 and workers[1].active == 1)
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        await workers[0].kill()
        await until(lambda: bool(cluster.service.readiness().degraded))
        gate.set()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert not result.completed().repaired


async def test_killed_generation_worker_is_replaced_by_another_one() -> None:
    transfers = FakeTransfers()
    workers = [
        FakeWorker("context-0", "context", transfers=transfers),
        FakeWorker("generation-0", "generation", transfers=transfers),
        FakeWorker("generation-1", "generation", transfers=transfers),
    ]
    async with rig(workers) as cluster:
        gate = asyncio.Event()
        for worker in workers:
            worker.script.decode_gate = gate
        request = make_request(max_tokens=5)
        stream = await cluster.service.submit(request)
        await until(lambda: any(worker.active for worker in workers[1:]))
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        victim = next(worker for worker in workers[1:] if worker.active)
        await victim.kill()
        gate.set()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired


async def test_without_any_worker_a_request_waits_for_a_new_incarnation() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[1].script.decode_gate = asyncio.Event()
        request = make_request(max_tokens=5)
        stream = await cluster.service.submit(request)
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        for worker in workers:
            await worker.kill()
        await until(lambda: "-> seeking" in cluster.story(stream.request_id))
        workers[1].script.decode_gate = None
        await workers[1].restart()
        cluster.publish()
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        assert result.completed().repaired


async def test_without_any_worker_until_the_deadline_a_request_fails_as_unavailable() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[1].script.decode_gate = asyncio.Event()
        stream = await cluster.service.submit(make_request(max_tokens=5, deadline_ms=300))
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        for worker in workers:
            await worker.kill()
        failed = (await Collected(1).read(stream)).failed()
        assert failed.http_status == 503
        assert failed.retry_after_s is not None


async def test_a_deadline_ends_a_request_on_a_worker_that_hangs() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[1].script.decode_gate = asyncio.Event()
        result = await cluster.run(make_request(max_tokens=5, deadline_ms=150))
        assert result.failed().http_status == 504
        await until(lambda: workers[1].active == 0)


async def test_repairs_are_budgeted() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        failure = bad_end("failed", "flaky", retryable=True)
        workers[0].script.failures.extend([failure] * 10)
        workers[1].script.failures.extend([failure] * 10)
        failed = (await cluster.run(make_request())).failed()
        assert (failed.code, failed.http_status) == ("repair_failed", 503)
        assert len(cluster.received(Generate)) <= 4


async def test_a_rejected_request_is_a_client_error_and_is_not_repaired() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[0].script.failures.append(bad_end("rejected", "bad_bias", retryable=False))
        workers[1].script.decode_gate = asyncio.Event()
        failed = (await cluster.run(make_request())).failed()
        assert (failed.code, failed.http_status) == ("bad_bias", 400)
        assert len(cluster.received(Generate)) == 1
        await until(lambda: workers[1].active == 0)


async def test_a_failure_that_is_not_retryable_ends_the_request() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[0].script.failures.append(bad_end("failed", "incompatible", retryable=False))
        failed = (await cluster.run(make_request())).failed()
        assert (failed.code, failed.http_status) == ("incompatible", 500)


def bad_logits(where: str) -> LegEnded:
    ending = bad_end("failed", "bad_logits", retryable=True)
    return ending.model_copy(update={"message": f"the model's numbers overflowed on {where}"})


async def test_logits_that_are_bad_on_two_workers_end_the_request() -> None:
    workers = [FakeWorker(f"aggregated-{number}", "aggregated") for number in range(3)]
    async with rig(workers) as cluster:
        for worker in workers:
            worker.script.failures.extend([bad_logits("this worker")] * 10)
        failed = (await cluster.run(make_request())).failed()
        assert (failed.code, failed.http_status) == ("bad_logits", 500)
        assert failed.retry_after_s is None
        assert failed.message == "the model's numbers overflowed on this worker"
        assert sorted(len(worker.script.failures) for worker in workers) == [9, 9, 10]
        assert cluster.metric("pageferry_repairs_total", cause="generation_failed") == 1


async def test_bad_logits_of_the_only_worker_are_not_asked_for_again() -> None:
    workers = [FakeWorker("aggregated-0", "aggregated")]
    async with rig(workers) as cluster:
        workers[0].script.failures.extend([bad_logits("it")] * 10)
        failed = (await cluster.run(make_request())).failed()
        assert (failed.code, failed.http_status) == ("bad_logits", 500)
        assert failed.message == "the model's numbers overflowed on it"
        assert len(cluster.received(Generate)) == 1


async def test_logits_that_are_bad_on_one_worker_are_repaired_on_the_other() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[0].script.failures.append(bad_logits("the first"))
        result = await cluster.run(make_request())
        assert result.completed().repaired


async def test_closing_a_stream_cancels_both_legs() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[0].script.prefill_s = 60.0
        stream = await cluster.service.submit(make_request())
        await until(lambda: workers[0].active == 1 and workers[1].active == 1)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))
        await until(lambda: workers[0].active == 0 and workers[1].active == 0)
        assert cluster.metric(
            "pageferry_requests_total", endpoint="completions", outcome="cancelled"
        )


async def test_a_stop_counts_up_to_its_index_and_frees_the_worker() -> None:
    workers = pair(generation=FakeScript(step_s=0.002))
    async with rig(workers) as cluster:
        request = make_request(max_tokens=2000, n=2)
        stream = await cluster.service.submit(request)
        seen = [0, 0]
        while min(seen) < 6:
            event = await anext(aiter(stream))
            if isinstance(event, TokenDelta):
                seen[event.choice] = event.index + len(event.tokens)
        stream.stop(0, 3)
        stream.stop(1, 5)
        result = Collected(2)
        result.offset = seen
        await result.read(stream)
        assert result.completed().completion_tokens == (3, 5)
        assert result.finished == {0: "stop", 1: "stop"}
        assert [m.index for m in cluster.received(Stop)] == [3]
        await until(lambda: workers[1].active == 0)


async def test_full_service_refuses_with_a_time_to_retry() -> None:
    workers = pair()
    async with rig(workers, make_settings(max_in_flight=2)) as cluster:
        workers[1].script.decode_gate = gate = asyncio.Event()
        streams = [await cluster.service.submit(make_request(first=i)) for i in range(2)]
        with pytest.raises(Overloaded) as caught:
            await cluster.service.submit(make_request())
        assert caught.value.retry_after_s >= 1
        gate.set()
        for stream in streams:
            (await Collected(1).read(stream)).completed()
        (await cluster.run(make_request())).completed()


async def test_requests_that_no_worker_could_serve_are_refused_at_once() -> None:
    async with rig(pair()) as cluster:
        for request, code in (
            (make_request(length=4000, max_tokens=97), "context_length_exceeded"),
            (make_request(length=0), "empty_prompt"),
            (make_request(max_tokens=0), "invalid_max_tokens"),
            (make_request(n=0), "invalid_n"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await cluster.service.submit(request)
            assert caught.value.code == code
        (await cluster.run(make_request(length=4000, max_tokens=96))).completed()


async def test_a_slow_reader_does_not_slow_others() -> None:
    async with rig(pair()) as cluster:
        slow = await cluster.service.submit(make_request(max_tokens=200))
        for _ in range(5):
            (await cluster.run(make_request(max_tokens=20))).completed()
        result = await Collected(1).read(slow)
        assert result.tokens == oracle(make_request(max_tokens=200))


async def test_silent_worker_is_suspected_then_lost_and_comes_back() -> None:
    workers = pair()
    async with rig(workers) as cluster:
        workers[1].script.decode_gate = asyncio.Event()
        request = make_request(max_tokens=4)
        stream = await cluster.service.submit(request)
        await until(lambda: "-> decoding" in cluster.story(stream.request_id))
        workers[1].script.silent = True
        await until(lambda: cluster.state("generation-0") == "suspected")
        await until(lambda: "-> seeking" in cluster.story(stream.request_id) or cluster.repairs > 0)
        workers[1].script.decode_gate = None
        workers[1].script.silent = False
        result = await Collected(1).read(stream)
        assert result.tokens == oracle(request)
        await until(lambda: cluster.state("generation-0") == "live")
        await cluster.ready()


async def test_a_wrong_cluster_token_is_refused_on_both_sides() -> None:
    worker = FakeWorker("aggregated-0", "aggregated", cluster_token="another-token")
    await worker.start()
    cluster = Rig([worker], make_settings())
    await cluster.service.start()
    cluster.publish()
    await until(lambda: cluster.state("aggregated-0") == "refused")
    status = cluster.service.readiness().workers[0]
    assert "PAGEFERRY_CLUSTER_TOKEN" in status.reason
    with pytest.raises(NotReady):
        await cluster.service.submit(make_request())
    await cluster.service.close()
    await worker.kill()


async def test_not_ready_before_expected_instances_and_the_canary() -> None:
    workers = pair()
    cluster = Rig(workers, make_settings(expected_instances=("generation-9",)))
    with pytest.raises(NotReady):
        await cluster.service.submit(make_request())
    for worker in workers:
        await worker.start()
    await cluster.service.start()
    cluster.publish()
    await until(lambda: cluster.state("generation-0") == "live")
    assert "instance generation-9 has not come up yet" in cluster.service.readiness().reasons
    await cluster.service.close()
    for worker in workers:
        await worker.kill()


async def test_a_failing_canary_shows_in_readiness_and_a_working_one_ends_it() -> None:
    workers = pair()
    eager = CanarySettings(idle_s=0.01, retry_s=0.01, timeout_s=5)
    async with rig(workers, make_settings(canary=eager)) as cluster:
        wedged = bad_end("failed", "wedged", retryable=False)
        workers[0].script.failures.extend([wedged] * 3)
        await until(lambda: not cluster.service.readiness().ready)
        assert "wedged" in cluster.service.readiness().reasons[0]
        await cluster.ready()
        assert cluster.metric("pageferry_requests_in_flight") == 0
        await until(lambda: cluster.service.in_flight == 0)


async def test_a_worker_that_says_it_is_not_ready_gets_nothing_new() -> None:
    transfers = FakeTransfers()
    workers = [
        FakeWorker("context-0", "context", transfers=transfers),
        FakeWorker("generation-0", "generation", transfers=transfers),
        FakeWorker("generation-1", "generation", transfers=transfers),
    ]
    async with rig(workers) as cluster:
        workers[1].script.ready = False
        while cluster.ready_of("generation-0"):  # gauges come with steps
            (await cluster.run(make_request(first=len(cluster.received(Generate))))).completed()
        workers[1].received.clear()
        for number in range(6):
            (await cluster.run(make_request(first=100 + number))).completed()
        assert not workers[1].received
        assert cluster.service.readiness().ready


async def test_aggregated_workers_serve_alone() -> None:
    workers = [FakeWorker(f"aggregated-{i}", "aggregated") for i in range(2)]
    async with rig(workers) as cluster:
        requests = [make_request(length=100, max_tokens=6, n=2, first=i) for i in range(8)]
        results = await asyncio.gather(*(cluster.run(request) for request in requests))
        for request, result in zip(requests, results, strict=True):
            assert result.tokens == oracle(request)
        assert not cluster.received(Prefill)
        served = {str(m.source) for m in cluster.received(Generate)}
        assert served == {"None"}
        assert all(worker.received for worker in workers)


async def test_random_disconnects_leave_nothing_behind() -> None:
    rng = random.Random(5)
    workers = pair(context=FakeScript(), generation=FakeScript())
    async with rig(workers) as cluster:
        workers[0].script.prefill_s = 0.01
        workers[1].script.step_s = 0.001

        async def one(number: int) -> None:
            request = make_request(length=70, max_tokens=20, first=number)
            stream = await cluster.service.submit(request)
            if number % 2:
                await asyncio.sleep(rng.random() * 0.05)
                await stream.aclose()
            else:
                result = await Collected(1).read(stream)
                assert result.tokens == oracle(request)

        await asyncio.gather(*(one(number) for number in range(60)))
        await cluster.idle()
        assert cluster.metric("pageferry_requests_in_flight") == 0
        await until(lambda: workers[0].active == 0 and workers[1].active == 0)
