"""The front end as a child process of the launcher, started again when it crashes.

The launcher binds the listening socket and hands it on, so the port stays ours and clients wait in
its queue while a crashed front end is replaced. Settings and membership go over the child's
standard input; its end tells the child to shut down, also when the launcher is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from typing import Final

from services.environment import child_environment
from services.errors import StartError
from services.membership import LAUNCHER_CODEC, FrontEndSettings, MembershipUpdate
from worker.config import WorkerAddress

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
RESTART_DELAY_S: Final = 0.5
KILL_AFTER_S: Final = 5.0
"""Beyond the time allowed for draining."""


class FrontEndProcess:
    """One front end. ``run`` keeps it alive; ``publish`` may be called at any time."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._workers: tuple[WorkerAddress, ...] = ()
        self._process: asyncio.subprocess.Process | None = None
        self._listening = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the front end that runs now."""
        return None if self._process is None else self._process.pid

    async def listening(self) -> None:
        """Wait until the front end answers on its port."""
        await self._listening.wait()

    def publish(self, workers: tuple[WorkerAddress, ...]) -> None:
        """Tell the front end which workers live; one that is being restarted is told when it is
        up."""
        self._workers = workers
        if self._process is not None:
            self._send(self._process, MembershipUpdate(workers=workers))

    async def run(self, settings: FrontEndSettings) -> None:
        """Keep a front end alive until cancelled. Raises StartError when the first one does not
        come up."""
        while True:
            code = await self._run_once(settings)
            if not self._listening.is_set():
                raise StartError(
                    f"the front end ended with exit code {code} before it listened; "
                    "its last lines above say why"
                )
            self._listening.clear()
            logger.error("the front end ended with exit code %d; starting it again", code)
            await asyncio.sleep(RESTART_DELAY_S)

    async def _run_once(self, settings: FrontEndSettings) -> int:
        # -P: a folder named `services` where the user stands must not be imported.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.frontend"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._listener.fileno(),),
            # Ctrl-C in a terminal goes to the launcher alone, which then ends everything in order.
            start_new_session=True,
            env=child_environment({}),
        )
        try:
            self._send(process, settings)
            self._send(process, MembershipUpdate(workers=self._workers))
            self._process = process
            await self._wait_until_listening(process)
            return await process.wait()
        except asyncio.CancelledError:
            # Asked to stop: once the child has closed its copy too, clients are refused at once.
            self._listener.close()
            raise
        finally:
            self._process = None
            await _end(process, settings.drain_timeout_ms / 1_000 + KILL_AFTER_S)

    async def _wait_until_listening(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError as error:
            raise StartError(
                f"the front end did not listen within {START_TIMEOUT_S:.0f} s"
            ) from error
        if line:
            event = json.loads(line)
            logger.info("front end %d listens on %s", event["pid"], event["url"])
            self._listening.set()

    def _send(
        self, process: asyncio.subprocess.Process, message: FrontEndSettings | MembershipUpdate
    ) -> None:
        """Never waits: a front end that does not read must not hold up the supervision of
        workers."""
        assert process.stdin is not None
        LAUNCHER_CODEC.write(process.stdin, [message])


async def _end(process: asyncio.subprocess.Process, limit_s: float) -> None:
    """End of input, then force. The front end drains by itself, within its own limit."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        logger.warning("front end %d did not end in time and is killed", process.pid)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def bind(host: str, port: int) -> socket.socket:
    """A bound, inheritable socket that does not listen yet. Raises StartError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartError(
            f"cannot bind {host}:{port}: {error}; choose another --port or --host"
        ) from error
    return listener
