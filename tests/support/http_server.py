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


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve ``app``; yields its base URL, such as ``http://127.0.0.1:40001``."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    config = uvicorn.Config(
        app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1, ws="none"
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task
        listener.close()
