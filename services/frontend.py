"""``python -m services.frontend``: one front end process, told by its standard input.

Reads the settings, then a list of live workers after every change; the end of the input means to
take no new requests, finish those in flight, and end. Prints one line of JSON once it listens.
Never loads torch, transformers, ray or ucxx: that is what makes it start fast and stay small.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from typing_extensions import override

from router.conversation import RouterSettings
from router.rules import LoadRule, RuleSettings
from services.errors import EXIT_FAILURE, EXIT_OK
from services.http.app import create_app
from services.http.protocol import BoundedHttpProtocol
from services.http.settings import HttpSettings
from services.log import configure_logging
from services.membership import LAUNCHER_CODEC, FrontEndSettings, MembershipUpdate
from services.orchestration.service import Orchestrator, OrchestratorSettings
from services.text.tokenizer import Tokenizer, TokenizerFilesError
from transfer.wire import FrameError

logger = logging.getLogger("services.frontend")

KEEP_ALIVE_S: Final = 75
BACKLOG: Final = 2048
ENDING_S: Final = 2
"""For the answers of requests that were ended because draining took too long."""


async def main() -> int:
    """Serve until the end of the input; the exit code."""
    try:
        reader = await _standard_input()
        settings = await LAUNCHER_CODEC.read(reader)
    except (FrameError, asyncio.IncompleteReadError, OSError) as error:
        sys.stderr.write(
            f"the front end is started by `pageferry serve`, which tells it what to do: {error}\n"
        )
        return EXIT_FAILURE
    if not isinstance(settings, FrontEndSettings):
        sys.stderr.write(f"expected settings as the first frame, got {settings.kind}\n")
        return EXIT_FAILURE
    configure_logging(settings.log_level)
    try:
        text = Tokenizer.load(Path(settings.tokenizer_directory))
    except TokenizerFilesError as error:
        logger.error("%s", error)  # noqa: TRY400  a broken file, not a bug
        return EXIT_FAILURE
    try:
        return await _serve(settings, text, reader)
    finally:
        text.close()


async def _serve(settings: FrontEndSettings, text: Tokenizer, reader: asyncio.StreamReader) -> int:
    registry = CollectorRegistry()
    ProcessCollector(namespace="pageferry_front_end", registry=registry)
    GCCollector(registry=registry)
    service = Orchestrator(
        OrchestratorSettings(
            cluster_token=settings.cluster_token,
            front_end=f"front-end-{os.getpid()}",
            expected_instances=settings.expected_instances,
            max_in_flight=settings.max_in_flight,
            router=RouterSettings(
                rules=RuleSettings(rule=LoadRule(settings.load_rule)),
                new_conversation_follow=settings.new_conversation_follow,
            ),
        ),
        registry=registry,
    )
    app = create_app(
        service,
        text,
        HttpSettings(request_timeout_s=settings.request_timeout_ms / 1_000),
        registry=registry,
    )
    try:
        listener = _listener(settings)
    except OSError as error:
        # The launcher's socket is bound, but another one that is too may have listened first.
        logger.error(  # noqa: TRY400  a port that is taken, not a bug
            "cannot listen on %s:%d: %s; choose another --port", settings.host, settings.port, error
        )
        return EXIT_FAILURE
    server = AnnouncingServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.drain_timeout_ms // 1_000 + ENDING_S,
        )
    )
    await service.start()
    drain_s = settings.drain_timeout_ms / 1_000
    follower = asyncio.create_task(_follow(reader, service, server, drain_s), name="membership")
    # What exists now lives as long as the process: collections need not look at it again.
    gc.freeze()
    try:
        await server.serve(sockets=[listener])
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
        await service.close()
    return EXIT_OK if server.started else EXIT_FAILURE


async def _follow(
    reader: asyncio.StreamReader,
    service: Orchestrator,
    server: uvicorn.Server,
    drain_s: float,
) -> None:
    """Apply every membership; at the end of the input, or when it makes no sense, end the server.

    Requests that are not finished within ``drain_s`` then end with an error.
    """
    try:
        while True:
            message = await LAUNCHER_CODEC.read(reader)
            if isinstance(message, MembershipUpdate):
                service.set_workers(message.workers)
    except asyncio.IncompleteReadError:
        logger.info("the launcher ended the input: draining")
    except FrameError:
        logger.exception("the launcher's frames cannot be understood: draining")
    server.should_exit = True
    await asyncio.sleep(drain_s)
    await service.close()


class AnnouncingServer(uvicorn.Server):
    """Says on standard output when it has begun to listen."""

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        host, port = sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        event = {"event": "listening", "url": f"http://{shown}:{port}", "pid": os.getpid()}
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _listener(settings: FrontEndSettings) -> socket.socket:
    if settings.listen_fd is not None:
        listener = socket.socket(fileno=settings.listen_fd)
        listener.listen(BACKLOG)
        return listener
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)


async def _standard_input() -> asyncio.StreamReader:
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        # uvloop aborts the process for anything else.
        raise OSError("expected a pipe as standard input")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
