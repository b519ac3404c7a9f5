"""The client's id of a request: a label on answers, never a key of anything.

Two requests with the same id are two requests. An id that is absent, too long or not printable is
replaced by a new one.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_KEY: Final = "pageferry.request_id"
_USABLE: Final = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Label of the request that ``scope`` belongs to."""
    label: str = scope[_KEY]
    return label


def new_request_id() -> str:
    """Label of a request that came without a usable one."""
    return f"req-{secrets.token_hex(16)}"


class RequestIdMiddleware:
    """Labels every request and echoes the label on its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        label = given if _USABLE.fullmatch(given) else new_request_id()
        scope[_KEY] = label

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = label
            await send(message)

        await self._app(scope, receive, labelled)
