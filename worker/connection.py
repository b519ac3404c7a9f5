"""One front end's connection: mutual proof, then commands in and step outputs out.

A reader that does not keep up never holds the engine back: outputs queue in the connection's own
buffer, and when that exceeds its bound the connection is cut, which cancels its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from transfer.auth import AuthenticationError, check_proof, mint_nonce, proof
from transfer.identity import Incarnation, PeerAddress
from transfer.wire import HEADER, FrameError, body_length
from worker.inbox import FrontEndCommand, FrontEndJoined, FrontEndLost, InboxItem
from worker.messages import (
    FRONT_END_CODEC,
    WORKER_CODEC,
    Challenge,
    Hello,
    Ping,
    Pong,
    Refused,
    StepOutput,
    Welcome,
    WorkerRole,
)
from worker.outlet import Outlet

HELLO_TIMEOUT_S = 10.0
MAX_HELLO_BYTES = 4096
MAX_BUFFERED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a front end is told about this worker."""

    incarnation: Incarnation
    role: WorkerRole
    model: str
    tokens_per_block: int
    max_sequence_tokens: int
    vocab_size: int
    peer: PeerAddress
    transport: str
    kv_dtype: str


class FrontEndConnection:
    """Runs in the IO thread, but for ``send_output`` and ``abort``."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self.number = number
        self._reader = reader
        self._outlet = Outlet(writer, asyncio.get_running_loop())
        self._max_buffered_bytes = max_buffered_bytes
        self._welcomed = False

    @property
    def welcomed(self) -> bool:
        """Whether both sides proved that they know the token."""
        return self._welcomed

    async def serve(
        self,
        facts: WorkerFacts,
        cluster_token: str,
        engine_age_ms: Callable[[], int],
        put: Callable[[InboxItem], None],
    ) -> None:
        """Shake hands, then pass commands on until the connection ends."""
        try:
            await self._shake_hands(facts, cluster_token)
            put(FrontEndJoined(self.number))
            while True:
                message = await FRONT_END_CODEC.read(self._reader)
                if isinstance(message, Ping):
                    self._send(Pong(sent_ms=message.sent_ms, engine_age_ms=engine_age_ms()))
                elif isinstance(message, Hello):
                    self._send(Refused(reason="a front end says hello only once"))
                    break
                else:
                    put(FrontEndCommand(self.number, message))
        except (FrameError, AuthenticationError) as error:
            self._send(Refused(reason=str(error)))
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # the front end is gone; what it asked for is cancelled below
        finally:
            if self._welcomed:
                put(FrontEndLost(self.number))
            self._welcomed = False
            self._outlet.finish()

    async def _shake_hands(self, facts: WorkerFacts, cluster_token: str) -> None:
        nonce = mint_nonce()
        self._send(Challenge(nonce=nonce))
        hello = await asyncio.wait_for(self._read_hello(), HELLO_TIMEOUT_S)
        check_proof(cluster_token, b"front-end", nonce, hello.proof)
        self._send(
            Welcome(
                proof=proof(cluster_token, b"worker", hello.nonce),
                incarnation=facts.incarnation,
                role=facts.role,
                model=facts.model,
                tokens_per_block=facts.tokens_per_block,
                max_sequence_tokens=facts.max_sequence_tokens,
                vocab_size=facts.vocab_size,
                peer=facts.peer,
                transport=facts.transport,
                kv_dtype=facts.kv_dtype,
            )
        )
        self._welcomed = True

    async def _read_hello(self) -> Hello:
        """The first message, of bounded size: whoever connects is a stranger until it is
        checked.
        """
        length = body_length(await self._reader.readexactly(HEADER.size))
        if length > MAX_HELLO_BYTES:
            raise FrameError(f"hello: expected at most {MAX_HELLO_BYTES} bytes, got {length}")
        message = FRONT_END_CODEC.decode_body(await self._reader.readexactly(length))
        if not isinstance(message, Hello):
            raise FrameError(f"expected a hello first, got {message.kind}")
        return message

    def send_output(self, output: StepOutput) -> bool:
        """Queue an output. False when the front end is too far behind: the connection is cut."""
        if self._outlet.waiting_bytes > self._max_buffered_bytes:
            self._outlet.abort()
            return False
        self._send(output)
        return True

    def abort(self) -> None:
        """Cut the connection."""
        self._outlet.abort()

    def _send(self, message: Challenge | Welcome | Refused | StepOutput | Pong) -> None:
        self._outlet.send(WORKER_CODEC.encode(message))
