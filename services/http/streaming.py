"""Server-sent events of one answer.

A stream ends in one of two ways that a client can tell apart: ``[DONE]`` after the last chunk, or
an ``error`` event and no ``[DONE]``. While nothing is produced, comments keep the connection alive.
The client's disconnect cancels the generation at any moment, also while it waits in a queue; a
client that reads slowly delays only itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from services.http.answers import Answers
from services.http.assembly import InconsistentEvents
from services.http.disconnect import ClientGone, end_task, unless_gone
from services.http.errors import ApiError, encode_json, internal_error
from services.http.generation import Generation
from services.http.metrics import HttpMetrics
from services.http.settings import HttpSettings

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_LOG = logging.getLogger(__name__)


def event(content: Mapping[str, Any]) -> bytes:
    """One event. JSON has no raw line breaks, so one data line always suffices."""
    return b"data: %s\n\n" % encode_json(content)


class _EventWriter:
    """Writes events to one client and notices when it stops reading or gets bored."""

    def __init__(self, send: Send, settings: HttpSettings) -> None:
        self._send = send
        self._settings = settings
        self._is_writing = False
        self._last_s = asyncio.get_running_loop().time()

    async def write(self, data: bytes) -> None:
        """Send ``data``. Raises ClientGone when the client takes nothing for too long."""
        self._is_writing = True
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._is_writing = False
            self._last_s = asyncio.get_running_loop().time()

    async def keep_alive(self) -> None:
        """Send a comment after every silence, until cancelled."""
        interval_s = self._settings.keep_alive_s
        while True:
            due_s = self._last_s + interval_s - asyncio.get_running_loop().time()
            if due_s > 0:
                await asyncio.sleep(due_s)
            elif self._is_writing:
                await asyncio.sleep(interval_s)
            else:
                await self.write(KEEP_ALIVE)


class EventStreamResponse(Response):
    """Streams a generation that was started, and closes it whatever happens."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        answers: Answers,
        settings: HttpSettings,
        metrics: HttpMetrics,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answers = answers
        self._settings = settings
        self._metrics = metrics

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        try:
            error = await unless_gone(receive, self._stream(send))
        except (ClientGone, OSError):
            self._metrics.client_disconnects.inc()
        else:
            if error is not None:
                self._metrics.stream_errors.inc()
        finally:
            await self._generation.aclose()

    async def _stream(self, send: Send) -> ApiError | None:
        """Serve the client that is there; the error that ended the stream, if one did."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writer = _EventWriter(send, self._settings)
        keeper = asyncio.ensure_future(writer.keep_alive())
        try:
            error = await self._write_events(writer)
        finally:
            await end_task(keeper)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return error

    async def _write_events(self, writer: _EventWriter) -> ApiError | None:
        for chunk in self._answers.opening(self._generation.choices):
            await writer.write(event(chunk))
        try:
            while (delta := await self._generation.next_delta()) is not None:
                for chunk in self._answers.delta(delta):
                    await writer.write(event(chunk))
        except ApiError as error:
            failure = error
        except InconsistentEvents:
            _LOG.exception("events of a generation are inconsistent")
            failure = internal_error()
        else:
            for chunk in self._answers.closing(self._generation.usage):
                await writer.write(event(chunk))
            await writer.write(DONE)
            return None
        await writer.write(event(failure.envelope()))
        return failure
