"""uvicorn's HTTP/1.1 protocol with bounds on what comes before a request is understood.

uvicorn keeps any amount of headers and waits for them for ever. Invariant: of a request head, or of
the trailers after a body, no more than :attr:`BoundedHttpProtocol.max_head_bytes` and one part are
ever kept, and a connection that waits for the rest of a head and serves nothing is closed within
:attr:`BoundedHttpProtocol.head_timeout_s`. A silent connection between two requests is uvicorn's to
close. What cannot be a request gets an error in OpenAI's shape, like everything else.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, Final

from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.http.errors import ApiError, encode_json, invalid
from services.http.request_id import HEADER, new_request_id

_PART: Final = 16 << 10
"""Bytes that are parsed before their number is looked at."""
_LINGER_S: Final = 2.0
"""Closing while bytes still arrive resets the connection, and the client never sees the error."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    max_head_bytes: ClassVar[int] = 64 << 10
    head_timeout_s: ClassVar[float] = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        """Parsed since the end of a head, the last bytes of a body or the end of a message."""
        self._awaits_head = True
        self._head_deadline: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        """Set once the connection was refused: nothing is read any more."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._awaits_head:
            self._expect_head()
        for start in range(0, len(data), _PART):
            if self._linger is not None or self.transport.is_closing():
                return
            part = data[start : start + _PART]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(_head_too_large(self.max_head_bytes))

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    @override
    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._awaits_head = False
        self._stop_expecting()
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._awaits_head = True
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(
            invalid(f"{msg} Expected HTTP/1.1; check the client.", code="invalid_http_request")
        )

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_expecting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        self._head_deadline = None
        if self._is_answering():
            # The next request of a client that has not got all of its last answer.
            self._expect_head()
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # declared without the None that it begins with
        return cycle is not None and not cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answer ``error`` unless that would end up within another answer, and close."""
        if self._linger is not None or self.transport.is_closing():
            return
        self._stop_expecting()
        if self._is_answering():
            self.transport.close()
            return
        body = encode_json(error.envelope())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (HEADER.encode(), new_request_id().encode()),
        ]
        status = HTTPStatus(error.status)
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
            + b"".join(b"%s: %s\r\n" % header for header in headers)
            + b"\r\n"
            + body
        )
        self.transport.write_eof()
        self._linger = self.loop.call_later(_LINGER_S, self.transport.close)


def _head_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        431,
        f"request headers: expected at most {max_bytes} bytes; shorten them",
        code="headers_too_large",
    )
