"""A client that leaves ends its request, at every stage and in every form, within a second."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message
from typing_extensions import override

from services.http.disconnect import ClientGone, unless_gone
from services.http.settings import HttpSettings
from services.orchestration.api import GenerationRequest, OutputStream, TokenDelta
from tests.services.http.conftest import FrontEnd, StartFrontEnd
from tests.support.scripted_service import ScriptedService, ScriptedStream, Step, answer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Connection:
    """One raw HTTP/1.1 connection: what a client really does, with nothing in between."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, served: FrontEnd, path: str, body: dict[str, Any]) -> Connection:
        content = json.dumps({"model": "tiny", **body}).encode()
        connection = await cls.open(served)
        connection.send(_head(path, len(content)) + content)
        return connection

    @classmethod
    async def open(cls, served: FrontEnd) -> Connection:
        host, port = served.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def leave(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "completion": (COMPLETIONS, {"prompt": "hi", "max_tokens": 200}),
    "two prompts": (COMPLETIONS, {"prompt": ["hi", "ho"], "max_tokens": 200}),
}


class Waiting:
    """A script that says when it was reached and never goes on."""

    def __init__(self, tokens_before: int) -> None:
        self.streams = asyncio.Semaphore(0)
        self._tokens = tokens_before
        self.forever = asyncio.Event()

    def __call__(self, request: GenerationRequest) -> list[Step]:
        self.streams.release()
        return [*(TokenDelta(0, at, (5,)) for at in range(self._tokens)), self.forever]


async def closed(stream: ScriptedStream) -> None:
    async with asyncio.timeout(1):
        await stream.closed.wait()
    assert stream.was_cancelled


@pytest.mark.parametrize("kind", list(BODIES))
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_leaving_cancels(
    start: StartFrontEnd, kind: str, tokens_before: int, *, is_stream: bool
) -> None:
    path, body = BODIES[kind]
    script = Waiting(tokens_before)
    async with start(script) as served:
        connection = await Connection.post(served, path, {**body, "stream": is_stream})
        for _ in range(len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1):
            await script.streams.acquire()
        if is_stream and tokens_before:
            await connection.reader.readuntil(b"finish_reason")
        await connection.leave()
        for stream in served.service.streams:
            await closed(stream)
        await served.idle()
        assert served.metric("pageferry_http_client_disconnects_total") == 1
        if not is_stream:
            assert served.metric("pageferry_http_requests_total", endpoint=path, status="499") == 1


@dataclass
class SlowToAccept(ScriptedService):
    """A cluster in which requests queue before they are accepted."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def submit(self, request: GenerationRequest) -> OutputStream:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return await super().submit(request)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_while_the_request_queues(start: StartFrontEnd, *, is_stream: bool) -> None:
    async with start(service_type=SlowToAccept) as served:
        assert isinstance(served.service, SlowToAccept)
        path, body = BODIES["chat"]
        connection = await Connection.post(served, path, {**body, "stream": is_stream})
        await served.service.reached.wait()
        await connection.leave()
        async with asyncio.timeout(1):
            await served.service.cancelled.wait()
        await served.idle()


async def test_leaving_before_the_body_is_complete(greeter: FrontEnd) -> None:
    connection = await Connection.open(greeter)
    connection.send(_head(CHAT, 1000) + b'{"model":')
    answered = await greeter.client.get("/health")
    assert answered.status_code == 200
    await connection.leave()
    await greeter.idle()
    assert greeter.service.streams == []
    assert greeter.metric("pageferry_http_client_disconnects_total") == 1


async def test_a_body_that_does_not_arrive(start: StartFrontEnd) -> None:
    async with start(settings=HttpSettings(body_timeout_s=0.05)) as served:
        connection = await Connection.open(served)
        connection.send(_head(CHAT, 1000))
        assert (await connection.reader.readline()).startswith(b"HTTP/1.1 408")
        await connection.leave()


async def test_a_slow_reader_delays_only_itself(start: StartFrontEnd) -> None:
    many = [5] * 200

    def script(request: GenerationRequest) -> list[Step]:
        # Wide events, so that the socket's buffers are full long before the end.
        return answer(request, [many] * request.n)

    settings = HttpSettings(write_timeout_s=0.2)
    async with start(script, settings=settings) as served:
        body = {"prompt": "a", "n": 16, "max_tokens": 200, "stream": True, "logprobs": 20}
        slow = await Connection.post(served, COMPLETIONS, body)
        slow.reader.set_exception(ConnectionError("never read"))
        other = await served.client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
        assert other.status_code == 200
        async with asyncio.timeout(10):
            await served.service.streams[0].closed.wait()
        await slow.leave()
        await served.idle()


async def test_the_answer_wins_over_a_simultaneous_disconnect() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 7

    assert await unless_gone(receive, work()) == 7


async def test_work_has_ended_when_the_client_is_reported_gone() -> None:
    gone = asyncio.Event()
    steps: list[str] = []

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            gone.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    with pytest.raises(ClientGone):
        await unless_gone(receive, work())
    assert steps == ["cleaned up"]


async def test_other_messages_are_no_disconnect() -> None:
    messages = iter(["http.request", "http.request", "http.disconnect"])

    async def receive() -> Message:
        return {"type": next(messages)}

    with pytest.raises(ClientGone):
        await unless_gone(receive, asyncio.Event().wait())
    assert list(messages) == []


async def test_cancelling_the_caller_cancels_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.ensure_future(unless_gone(receive, work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
