"""A real uvicorn in the test's own event loop, on a free port.

httpx's ASGI transport collects a whole answer before it returns any of it and reports no
disconnect, so streaming and cancellation can only be tried on a socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from services.http.protocol import BoundedHttpProtocol


class _PromptServer(uvicorn.Server):
    """Stops at once instead of at the next tick of a clock."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    @override
    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leave.wait()


@asynccontextmanager
async def serving(
    app: ASGIApp, protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol
) -> AsyncIterator[str]:
    """Serve ``app``; yields its base URL, such as ``http://127.0.0.1:40001``."""
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio sets this only on sockets that it made itself; without it every answer takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host, port = listener.getsockname()
    config = uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = _PromptServer(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield f"http://{host}:{port}"
    finally:
        server.force_exit = True
        server.leave.set()
        await task
        listener.close()
