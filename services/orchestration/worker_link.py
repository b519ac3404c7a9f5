"""The connection of this front end to one incarnation of a worker.

One task reads, one task writes everything that gathered since its last write, one task sends
heartbeats. The listener is told of every change; it hears ``link_lost`` once for every connection
that had been up, so that each leg sent over a connection has an end. The link dials again until it
is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from transfer.auth import AuthenticationError, check_proof, mint_nonce, proof
from transfer.identity import Incarnation
from transfer.silence import Silence
from transfer.wire import FrameError, queue_frames
from worker.config import WorkerAddress
from worker.messages import (
    FRONT_END_CODEC,
    WORKER_CODEC,
    Cancel,
    Challenge,
    Generate,
    Hello,
    Ping,
    Pong,
    Prefill,
    Refused,
    StepOutput,
    Stop,
    Warm,
    Welcome,
    WorkerGauges,
)

logger = logging.getLogger(__name__)

STREAM_LIMIT_BYTES: Final = 1 << 20
WRITE_LOW_BYTES: Final = 1 << 20

Command = Prefill | Generate | Cancel | Stop | Warm


class LinkState(Enum):
    """What can be asked of the worker."""

    CONNECTING = "connecting"
    LIVE = "live"
    SUSPECTED = "suspected"
    """Silent or wedged: what runs there goes on, nothing new is sent."""
    REFUSED = "refused"
    """It speaks another protocol, does not know the cluster token, or is someone else."""
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LinkTimings:
    """Seconds. Silence counts only while this front end itself runs."""

    heartbeat_s: float = 1.0
    suspect_s: float = 5.0
    """Silence after which nothing new is placed there."""
    lost_s: float = 15.0
    """Silence after which the connection is given up and its requests are repaired."""
    engine_stall_s: float = 30.0
    """Age of the worker's last engine step, by its own word, above which it counts as wedged."""
    connect_s: float = 5.0
    pairs_s: float = 10.0
    """Longest that a ready worker is kept from requests until its transfer pairs are connected."""
    retry_s: float = 0.2
    max_retry_s: float = 2.0


class LinkListener(Protocol):
    """Who owns the links. Called in the event loop; must not block."""

    def link_up(self, link: WorkerLink) -> None:
        """The handshake is done; commands may be sent."""

    def link_changed(self, link: WorkerLink) -> None:
        """State or readiness changed."""

    def link_step(self, link: WorkerLink, output: StepOutput) -> None:
        """One step of the worker."""

    def link_lost(self, link: WorkerLink) -> None:
        """The connection is gone and every leg on it is over."""


class _Lost(ConnectionError):
    """The connection is given up, with the reason."""


class WorkerLink:
    """One worker incarnation. Made, started and closed by the cluster."""

    def __init__(
        self,
        address: WorkerAddress,
        listener: LinkListener,
        *,
        front_end: str,
        cluster_token: str,
        timings: LinkTimings,
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.reason = "connecting"
        self.welcome: Welcome | None = None
        """Of the last handshake; kept while reconnecting."""
        self.gauges: WorkerGauges | None = None
        self._listener = listener
        self._front_end = front_end
        self._cluster_token = cluster_token
        self._timings = timings
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._up = False
        self._silence = Silence(timings.heartbeat_s, time.monotonic())
        self._engine_age_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> Incarnation:
        """Who is at the other end."""
        return self.address.incarnation

    @property
    def up(self) -> bool:
        """Whether commands can be sent, suspected or not."""
        return self._up

    @property
    def ready(self) -> bool:
        """Live, and ready by its own word."""
        return self.state is LinkState.LIVE and self.gauges is not None and self.gauges.ready

    def start(self) -> None:
        """Dial in the background."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"link-{self.incarnation}"
        )
        self._task.add_done_callback(self._ended)

    def disconnect(self) -> None:
        """Nothing is sent or heard from now on. The listener hears ``link_lost`` if it was up."""
        self._down(LinkState.CLOSED, "closed")
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Disconnect and wait for the tasks to end."""
        self.disconnect()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, command: Command) -> None:
        """Queue a command. Raises ConnectionError when the connection is not up."""
        if not self._up:
            raise ConnectionError(f"worker {self.incarnation} is not connected: {self.reason}")
        self._outbox.append(FRONT_END_CODEC.encode(command))
        self._wake.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A bug in a listener must not leave the worker without a connection for ever."""
        if task.cancelled() or self.state is LinkState.CLOSED:
            return
        error = task.exception()
        logger.error("link to worker %s failed; dialling again", self.incarnation, exc_info=error)
        self._down(LinkState.CONNECTING, f"internal error: {error}")
        self.start()

    async def _run(self) -> None:
        delay_s = self._timings.retry_s
        while True:
            try:
                await self._connection()
            except (AuthenticationError, FrameError) as error:
                self._down(LinkState.REFUSED, str(error))
                delay_s = self._timings.max_retry_s
            except (OSError, EOFError, TimeoutError) as error:
                if self._up:
                    delay_s = self._timings.retry_s
                what = str(error) or type(error).__name__
                self._down(LinkState.CONNECTING, f"connection lost: {what}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._timings.max_retry_s)

    async def _connection(self) -> None:
        address = self.address
        async with asyncio.timeout(self._timings.connect_s):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, limit=STREAM_LIMIT_BYTES
            )
        try:
            async with asyncio.timeout(self._timings.connect_s):
                self.welcome = await self._handshake(reader, writer)
            self._outbox.clear()
            self._silence = Silence(self._timings.heartbeat_s, time.monotonic())
            self._engine_age_s = 0.0
            self._up = True
            self._set_state(LinkState.LIVE, "")
            self._listener.link_up(self)
            await self._pump(reader, writer)
        finally:
            writer.transport.abort()

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Welcome:
        challenge = await WORKER_CODEC.read(reader)
        if not isinstance(challenge, Challenge):
            raise FrameError(f"handshake: expected challenge, got {challenge.kind}")
        nonce = mint_nonce()
        hello = Hello(
            front_end=self._front_end,
            proof=proof(self._cluster_token, b"front-end", challenge.nonce),
            nonce=nonce,
        )
        FRONT_END_CODEC.write(writer, (hello,))
        welcome = await WORKER_CODEC.read(reader)
        if isinstance(welcome, Refused):
            raise AuthenticationError(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise FrameError(f"handshake: expected welcome, got {welcome.kind}")
        check_proof(self._cluster_token, b"worker", nonce, welcome.proof)
        if welcome.incarnation != self.incarnation:
            raise FrameError(f"expected worker {self.incarnation}, got {welcome.incarnation}")
        return welcome

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the three tasks until the first one fails; its error says why the connection is
        gone.
        """
        loop = asyncio.get_running_loop()
        tasks = (
            loop.create_task(self._read(reader)),
            loop.create_task(self._write(writer)),
            loop.create_task(self._beat()),
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = await WORKER_CODEC.read(reader)
            self._silence.heard(time.monotonic())
            if not self._up:
                return
            match message:
                case StepOutput():
                    self._take_gauges(message.gauges)
                    self._listener.link_step(self, message)
                case Pong():
                    self._engine_age_s = message.engine_age_ms / 1000
                case _:
                    raise FrameError(f"expected step or pong, got {message.kind}")

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=WRITE_LOW_BYTES)
        while True:
            await self._wake.wait()
            self._wake.clear()
            frames = b"".join(self._outbox)
            self._outbox.clear()
            queue_frames(writer, frames)
            await writer.drain()

    async def _beat(self) -> None:
        timings = self._timings
        while True:
            self._outbox.append(FRONT_END_CODEC.encode(Ping(sent_ms=int(time.monotonic() * 1000))))
            self._wake.set()
            await asyncio.sleep(timings.heartbeat_s)
            silence_s = self._silence.tick(time.monotonic())
            if silence_s > timings.lost_s:
                raise _Lost(f"silent for {silence_s:.1f} s")
            if silence_s > timings.suspect_s:
                self._set_state(LinkState.SUSPECTED, f"silent for {silence_s:.0f} s")
            elif self._engine_age_s > timings.engine_stall_s:
                stall = f"its engine has not stepped for {self._engine_age_s:.0f} s"
                self._set_state(LinkState.SUSPECTED, stall)
            else:
                self._set_state(LinkState.LIVE, "")

    def _take_gauges(self, gauges: WorkerGauges | None) -> None:
        if gauges is None:
            return
        was_ready = self.ready
        self.gauges = gauges
        if self.ready != was_ready:
            self._listener.link_changed(self)

    def _set_state(self, state: LinkState, reason: str) -> None:
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            if reason and state is not LinkState.CLOSED:
                logger.warning("worker %s is %s: %s", self.incarnation, state.value, reason)
            else:
                logger.info("worker %s is %s", self.incarnation, state.value)
            self._listener.link_changed(self)

    def _down(self, state: LinkState, reason: str) -> None:
        was_up, self._up = self._up, False
        self.gauges = None
        self._set_state(state, reason)
        self.reason = reason
        if was_up:
            self._listener.link_lost(self)
