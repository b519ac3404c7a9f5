"""Labels, liveness, readiness, models, metrics, keep-alives and failures under way."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest

from services.http.settings import HttpSettings
from services.orchestration.api import (
    Completed,
    Failed,
    GenerationRequest,
    Readiness,
    TokenDelta,
    WorkerStatus,
)
from tests.services.http.conftest import FrontEnd, StartFrontEnd
from tests.support.scripted_service import Step, answer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LOST = Failed("worker_lost", "every worker was lost", 502)


async def test_the_request_id_is_echoed_everywhere(greeter: FrontEnd) -> None:
    headers = {"x-request-id": "mine-1"}
    for response in (
        await greeter.client.post(CHAT, json=BODY, headers=headers),
        await greeter.client.post(CHAT, json={**BODY, "stream": True}, headers=headers),
        await greeter.client.post(CHAT, content=b"{", headers=headers),
        await greeter.client.get("/nothing", headers=headers),
        await greeter.client.get("/health", headers=headers),
    ):
        assert response.headers.get_list("x-request-id") == ["mine-1"]


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "caf\u00e9"])
async def test_an_unusable_request_id_is_replaced(greeter: FrontEnd, given: str) -> None:
    response = await greeter.client.get("/health", headers={b"x-request-id": given.encode()})
    assert re.fullmatch(r"req-[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.filterwarnings("error")
async def test_the_description_of_the_api_names_each_path(greeter: FrontEnd) -> None:
    response = await greeter.client.get("/openapi.json")
    assert {CHAT, "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(
        response.json()["paths"]
    )
    for path in ("/health", "/ready"):
        assert (await greeter.client.head(path)).status_code == 200


async def test_the_same_request_id_many_times(start: StartFrontEnd) -> None:
    def echo(request: GenerationRequest) -> list[Step]:
        return answer(request, [request.tokens.tolist()], "length")

    async with start(echo) as served:
        prompts = [f"prompt number {number}" for number in range(50)]
        responses = await asyncio.gather(
            *(
                served.client.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": prompt, "max_tokens": 50},
                    headers={"x-request-id": "same"},
                )
                for prompt in prompts
            )
        )
    assert [response.json()["choices"][0]["text"] for response in responses] == prompts
    assert len({response.json()["id"] for response in responses}) == 50


async def test_liveness_and_readiness(greeter: FrontEnd) -> None:
    assert (await greeter.client.get("/health")).json() == {"status": "ok"}
    for path in ("/health", "/ready"):  # what some load balancers ask
        head = await greeter.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    ready = await greeter.client.get("/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    worker = WorkerStatus(
        instance="context-0",
        incarnation="context-0@1",
        role="context",
        state="suspected",
        ready=False,
        reason="silent",
    )
    greeter.service.state = Readiness(False, ("no context worker",), (worker,))  # noqa: FBT003
    ready = await greeter.client.get("/ready")
    assert ready.status_code == 503
    assert ready.headers["retry-after"] == "1"
    assert ready.json()["reasons"] == ["no context worker"]
    assert ready.json()["workers"][0]["state"] == "suspected"
    greeter.service.state = Readiness(True, (), (worker,), ("no context worker",))  # noqa: FBT003
    ready = await greeter.client.get("/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert ready.json()["reasons"] == ready.json()["degraded"] == ["no context worker"]
    assert (await greeter.client.get("/health")).status_code == 200


async def test_models(greeter: FrontEnd) -> None:
    models = await greeter.openai.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await greeter.openai.models.retrieve("tiny")).owned_by == "pageferry"
    with pytest.raises(openai.NotFoundError):
        await greeter.openai.models.retrieve("other/name")


async def test_metrics_count_each_request_once(greeter: FrontEnd) -> None:
    for _ in range(3):
        await greeter.client.post(CHAT, json=BODY)
    await greeter.client.post(CHAT, content=b"{")
    for number in range(5):
        await greeter.client.get(f"/scan/{number}")
    text = (await greeter.client.get("/metrics")).text
    name = "pageferry_http_requests_total"
    assert f'{name}{{endpoint="{CHAT}",status="200"}} 3.0' in text
    assert f'{name}{{endpoint="{CHAT}",status="400"}} 1.0' in text
    assert f'{name}{{endpoint="unknown",status="404"}} 5.0' in text
    assert "/scan" not in text
    assert greeter.metric("pageferry_http_in_flight") == 0


async def test_many_bad_bodies_then_good_ones(greeter: FrontEnd) -> None:
    for _ in range(100):
        assert (await greeter.client.post(CHAT, content=b'{"model"')).status_code == 400
    assert greeter.service.requests == []
    responses = await asyncio.gather(*(greeter.client.post(CHAT, json=BODY) for _ in range(20)))
    assert {response.status_code for response in responses} == {200}


async def test_a_silent_stream_is_kept_alive(start: StartFrontEnd) -> None:
    gate = asyncio.Event()
    settings = HttpSettings(keep_alive_s=0.05)

    def script(request: GenerationRequest) -> list[Step]:
        return [gate, *answer(request, [[5]])]

    async with (
        start(script, settings=settings) as served,
        served.client.stream("POST", CHAT, json={**BODY, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        seen = [await anext(lines)]
        while seen.count(": keep-alive") < 3:
            seen.append(await anext(lines))
        assert '"role":"assistant"' in seen[0]
        gate.set()
        rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]


async def test_the_official_client_reads_over_keep_alives(start: StartFrontEnd) -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, gate.set)
    settings = HttpSettings(keep_alive_s=0.05)

    async with start(lambda r: [gate, *answer(r, [[5, 6]])], settings=settings) as served:
        stream = await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_chunks_leave_as_soon_as_they_are_made(start: StartFrontEnd) -> None:
    gates = [asyncio.Event() for _ in range(3)]

    def script(request: GenerationRequest) -> list[Step]:
        steps = answer(request, [[5, 6, 7]])
        return [steps[0], gates[0], steps[1], gates[1], steps[2], gates[2], *steps[3:]]

    async with (
        start(script) as served,
        served.client.stream("POST", CHAT, json={**BODY, "stream": True}) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line)
        assert '"role"' in await anext(lines)
        for gate in gates:
            assert '"content"' in await anext(lines)
            gate.set()
        assert '"finish_reason":"stop"' in await anext(lines)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(
    start: StartFrontEnd, *, is_stream: bool
) -> None:
    async with start(lambda _: [LOST]) as served:
        response = await served.client.post(CHAT, json={**BODY, "stream": is_stream})
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "worker_lost"
        assert served.service.streams[0].closed.is_set()


async def test_clients_are_told_that_asking_for_bad_logits_again_is_of_no_use(
    start: StartFrontEnd,
) -> None:
    async with start(lambda _: [Failed("bad_logits", "overflow", 500)]) as served:
        response = await served.client.post(CHAT, json=BODY)
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        asked = len(served.service.streams)
        with pytest.raises(openai.InternalServerError, match="overflow"):
            await served.openai.with_options(max_retries=2).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}]
            )
        assert len(served.service.streams) == asked + 1


async def test_a_failure_in_the_middle(start: StartFrontEnd) -> None:
    async with start(lambda _: [TokenDelta(0, 0, (5,)), LOST]) as served:
        assert (await served.client.post(CHAT, json=BODY)).status_code == 502
        stream = await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="every worker was lost"):
            async for _ in stream:
                pass
        await served.idle()
        assert served.metric("pageferry_http_stream_errors_total") == 1


@pytest.mark.parametrize(
    "steps",
    [
        [TokenDelta(0, 0, (5,)), TokenDelta(0, 2, (5,))],
        [TokenDelta(0, 0, (5,)), Completed(1, 0, (1,))],
        [TokenDelta(0, 0, (5,))],
    ],
    ids=["gap", "unfinished", "no end"],
)
async def test_a_broken_promise_of_the_cluster_is_an_error_too(
    start: StartFrontEnd, steps: list[Step]
) -> None:
    async with start(lambda _: steps) as served:
        assert (await served.client.post(CHAT, json=BODY)).status_code == 500
        response = await served.client.post(CHAT, json={**BODY, "stream": True})
        assert '"code":"internal_error"' in response.text
        assert "[DONE]" not in response.text
        await served.idle()
        assert all(stream.closed.is_set() for stream in served.service.streams)


async def test_what_fails_after_the_whole_answer_does_not_matter(start: StartFrontEnd) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [*answer(request, [[5]])[:-1], LOST]

    async with start(script) as served:
        assert (await served.client.post(CHAT, json=BODY)).status_code == 200
        response = await served.client.post(CHAT, json={**BODY, "stream": True})
        assert response.text.endswith("data: [DONE]\n\n")


async def test_when_one_prompt_fails_the_others_are_cancelled(start: StartFrontEnd) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [LOST] if request.tokens[0] == 9 else [asyncio.Event()]

    async with start(script) as served:
        body = {"model": "tiny", "prompt": [[8], [9], [8]]}
        for is_stream in (False, True):
            response = await served.client.post(
                "/v1/completions", json={**body, "stream": is_stream}
            )
            assert response.status_code == 502
        await served.idle()
        assert [stream.was_cancelled for stream in served.service.streams] == [
            True,
            False,
            True,
        ] * 2


async def test_two_applications_in_one_process(start: StartFrontEnd) -> None:
    async with start() as first, start() as second:
        for served in (first, second):
            response: httpx.Response = await served.client.post(CHAT, json=BODY)
            assert response.status_code == 200
        assert len(first.service.requests) == len(second.service.requests) == 1
