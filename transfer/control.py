"""Control connections between ranks: asyncio TCP, proved both ways before anything else is read.

The generation side dials. Until the other side has proved that it knows the cluster token, only
frames of a few hundred bytes are read and nothing of ours is shown. Afterwards both introduce
themselves, both check the other's facts, and a pair that does not fit is refused with every reason.
A link beats when it is idle and ends when the other side is silent for too long: a stopped process
keeps its sockets open, so nothing else would tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from transfer.auth import AuthenticationError, check_proof, mint_nonce, proof
from transfer.messages import (
    CONTROL_CODEC,
    Challenge,
    ControlMessage,
    Heartbeat,
    Hello,
    Introduction,
    PeerRefused,
    SessionMessage,
    Welcome,
)
from transfer.silence import Silence
from transfer.wire import HEADER, MAX_FRAME_BYTES, FrameError, body_length

logger = logging.getLogger(__name__)

UNPROVED_FRAME_BYTES: Final = 512
"""Largest body read from a side that has proved nothing."""
INTRODUCTION_FRAME_BYTES: Final = 4 << 20
MAX_UNSENT_BYTES: Final = 64 << 20
"""A peer that does not read for so long is lost."""
LINGER_S: Final = 1.0
"""How long a closed connection tries to say its last words to a peer that does not read."""
GENERATION: Final = b"generation"
CONTEXT: Final = b"context"

MessageT = TypeVar("MessageT", bound=ControlMessage)


class HandshakeError(ConnectionError):
    """The connection cannot be used; ``reasons`` are for the requests that wanted it."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class PeerRefusedError(HandshakeError):
    """The pair does not fit: this side or the other found why."""


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """How long a control connection may take, in ms."""

    connect_ms: int = 5_000
    """From dialling to the end of the handshake, and for the data endpoint after it."""
    heartbeat_ms: int = 500
    silence_ms: int = 3_000
    """Without a word the peer is lost. Several heartbeats, so that a late one does no harm."""

    def __post_init__(self) -> None:
        if self.silence_ms <= 2 * self.heartbeat_ms:
            raise ValueError(
                f"silence_ms {self.silence_ms}: expected more than two heartbeats of "
                f"{self.heartbeat_ms} ms"
            )


class ControlConnection:
    """Frames over one TCP connection, with bounds on what is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, limit_bytes: int = MAX_FRAME_BYTES) -> ControlMessage:
        """Raises FrameError, or OSError or EOFError when the other side is gone."""
        length = body_length(await self._reader.readexactly(HEADER.size))
        if length > limit_bytes:
            raise FrameError(f"frame body of {length} bytes where at most {limit_bytes} may come")
        return CONTROL_CODEC.decode_body(await self._reader.readexactly(length))

    async def expect(self, kind: type[MessageT], limit_bytes: int) -> MessageT:
        """Read one message of this kind. Raises PeerRefusedError when the other side refuses."""
        message = await self.read(limit_bytes)
        if isinstance(message, kind):
            return message
        if isinstance(message, PeerRefused):
            raise PeerRefusedError(*message.reasons)
        raise FrameError(f"expected {kind.__name__}, got {type(message).__name__}")

    def write(self, message: ControlMessage) -> None:
        """Queue one message."""
        CONTROL_CODEC.write(self._writer, (message,))

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close; what was queued is still sent if the peer takes it soon."""
        self._writer.close()
        if self.unsent_bytes:
            loop = asyncio.get_running_loop()
            loop.call_later(LINGER_S, self._writer.transport.abort)


async def prove_as_generation(connection: ControlConnection, cluster_token: str) -> None:
    """The dialler's half of the proofs. Raises AuthenticationError, FrameError."""
    challenge = await connection.expect(Challenge, UNPROVED_FRAME_BYTES)
    nonce = mint_nonce()
    connection.write(Hello(proof=proof(cluster_token, GENERATION, challenge.nonce), nonce=nonce))
    welcome = await connection.expect(Welcome, UNPROVED_FRAME_BYTES)
    check_proof(cluster_token, CONTEXT, nonce, welcome.proof)


async def prove_as_context(connection: ControlConnection, cluster_token: str) -> None:
    """The accepting half of the proofs. Raises AuthenticationError, FrameError."""
    nonce = mint_nonce()
    connection.write(Challenge(nonce=nonce))
    hello = await connection.expect(Hello, UNPROVED_FRAME_BYTES)
    check_proof(cluster_token, GENERATION, nonce, hello.proof)
    connection.write(Welcome(proof=proof(cluster_token, CONTEXT, hello.nonce)))


async def read_introduction(connection: ControlConnection) -> Introduction:
    """Who the proved peer is."""
    return await connection.expect(Introduction, INTRODUCTION_FRAME_BYTES)


def refuse(connection: ControlConnection, *reasons: str) -> None:
    """Say why, then close."""
    connection.write(PeerRefused(reasons=reasons))
    connection.close()


HANDSHAKE_FAILURES: Final = (
    AuthenticationError,
    HandshakeError,
    ValueError,
    OSError,
    EOFError,
    TimeoutError,
)
"""All that may go wrong with a connection before it is a link. ValueError: no frame, facts that no
plan can be made of, or a host that is no name.
"""


def describe(error: Exception) -> str:
    """The error's text, or its name where it has none."""
    return str(error) or type(error).__name__


class ControlLink:
    """An introduced connection: session messages both ways, heartbeats, one end."""

    def __init__(
        self,
        connection: ControlConnection,
        timing: ControlTiming,
        received: Callable[[SessionMessage], None],
        ended: Callable[[str], None],
    ) -> None:
        """``received`` gets each session message; ``ended(reason)`` is called exactly once."""
        self._connection = connection
        self._timing = timing
        self._received = received
        self._ended: Callable[[str], None] | None = ended
        self._loop = asyncio.get_running_loop()
        self._said_s = self._loop.time()
        self._silence = Silence(timing.heartbeat_ms / 1000, self._said_s)
        self._reader = self._loop.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        self._ticker = self._loop.call_later(timing.heartbeat_ms / 1000, self._tick)

    @property
    def open(self) -> bool:
        """Whether messages still go out."""
        return self._ended is not None

    def send(self, message: SessionMessage | Heartbeat) -> None:
        """Queue a message; dropped when the link has ended."""
        if self._ended is None:
            return
        self._connection.write(message)
        self._said_s = self._loop.time()
        if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            self.end("the peer does not read its control connection")

    def refuse(self, *reasons: str) -> None:
        """Tell the peer why, then end."""
        if self._ended is not None:
            self._connection.write(PeerRefused(reasons=reasons))
        self.end("; ".join(reasons))

    def end(self, reason: str) -> None:
        """End from this side. Idempotent."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        self._ticker.cancel()
        self._reader.cancel()
        self._connection.close()
        ended(reason)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._connection.read()
                self._silence.heard(self._loop.time())
                if isinstance(message, PeerRefused):
                    self.end(f"the peer refused this pair: {'; '.join(message.reasons)}")
                    return
                if isinstance(message, Challenge | Hello | Welcome | Introduction):
                    self.end(f"the peer broke the protocol: {message.kind} after the handshake")
                    return
                if not isinstance(message, Heartbeat):
                    self._received(message)
        except FrameError as error:
            self.end(f"the peer broke the protocol: {error}")
        except (OSError, EOFError) as error:
            self.end(f"control connection closed by the peer: {describe(error)}")

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """A message that broke whoever it was for must not leave a link that hears nothing."""
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            logger.error("a control connection is ended by an internal error", exc_info=error)
            self.end(f"internal error: {error!r}")

    def _tick(self) -> None:
        now = self._loop.time()
        beat_s = self._timing.heartbeat_ms / 1000
        if self._silence.tick(now) > self._timing.silence_ms / 1000:
            self.end(f"no word from the peer for {self._timing.silence_ms} ms")
            return
        if now - self._said_s >= beat_s / 2:
            self.send(Heartbeat())
        if self._ended is not None:
            self._ticker = self._loop.call_later(beat_s, self._tick)
