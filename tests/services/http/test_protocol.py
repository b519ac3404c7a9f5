"""What comes before a request is understood is bounded, in size and in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.http.protocol import BoundedHttpProtocol
from tests.support.http_server import serving

LIMIT = BoundedHttpProtocol.max_head_bytes
GET = b"GET / HTTP/1.1\r\nhost: test\r\n"


class Impatient(BoundedHttpProtocol):
    head_timeout_s = 0.2


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] != "http.disconnect":
        await PlainTextResponse("read")(scope, receive, send)


@asynccontextmanager
async def connected(
    url: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/json" in head
    assert b"\r\nx-request-id: req-" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"a" * (4 * LIMIT),
        GET + b"x: y\r\n" * LIMIT,
        GET + b"a" * (4 * LIMIT),
        b"GET /" + b"a" * (4 * LIMIT),
        b"\r\n" * (2 * LIMIT),
    ],
    ids=["one header", "many headers", "a name", "the path", "empty lines"],
)
async def test_a_head_that_is_too_large(head: bytes) -> None:
    async with serving(hello) as url, connected(url) as (reader, writer):
        writer.write(head)
        # To its end: the connection is closed, though the client has not.
        assert error_of(await reader.read(), 431)["code"] == "headers_too_large"


async def test_a_head_just_below_the_limit_and_a_large_body_are_served() -> None:
    body = b"x" * (4 * LIMIT)
    head = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n" % len(body)
    head += b"x: " + b"a" * (LIMIT - len(head) - 7) + b"\r\n\r\n"
    assert len(head) == LIMIT
    async with serving(read_all) as url, connected(url) as (reader, writer):
        for _ in range(2):
            writer.write(head + body)
            assert (await reader.readuntil(b"\r\n\r\nread")).startswith(b"HTTP/1.1 200 ")


async def test_trailers_are_bounded_too() -> None:
    async with serving(read_all) as url, connected(url) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n0\r\nx: " + b"a" * (4 * LIMIT))
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed with bytes still on their way
            answer = await reader.read()
        assert answer == b""


@pytest.mark.parametrize("sent", [b"", b"GET", GET, b"\r\n"])
async def test_a_head_that_never_comes(sent: bytes) -> None:
    async with serving(hello, Impatient) as url, connected(url) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_the_next_head_never_comes() -> None:
    async with serving(hello, Impatient) as url, connected(url) as (reader, writer):
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"\r\n\r\nhello")
        writer.write(GET)
        assert await reader.read() == b""


async def test_neither_slow_answers_nor_idle_connections_are_closed() -> None:
    pause = 3 * Impatient.head_timeout_s

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            await asyncio.sleep(pause)
            yield b"b"

        await StreamingResponse(parts())(scope, receive, send)

    async with serving(slow, Impatient) as url, connected(url) as (reader, writer):
        writer.write(GET + b"\r\n" + GET)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), pause)


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
async def test_what_is_no_http(sent: bytes) -> None:
    async with serving(hello) as url, connected(url) as (reader, writer):
        writer.write(sent)
        assert error_of(await reader.read(), 400)["code"] == "invalid_http_request"
