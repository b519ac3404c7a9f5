"""A worker without a model: a TCP server that speaks ``worker.messages`` and answers with scripted
tokens.

Several of them make a cluster for tests of endpoints, orchestration and launch. Workers that share
a :class:`FakeTransfers` behave like a real pair: the generation leg decodes only what the context
leg has handed over, and fails retryably when the context worker is killed first. Without one, a
generation leg with a source starts at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.support.fake_tokens import FAKE_VOCAB_SIZE, fake_token
from tests.support.gauges import IDLE_GAUGES
from transfer.auth import AuthenticationError, check_proof, mint_nonce, proof
from transfer.identity import Incarnation, PeerAddress
from transfer.wire import FrameError, pack_ints, unpack_ints
from worker.config import WorkerAddress
from worker.messages import (
    FRONT_END_CODEC,
    WORKER_CODEC,
    Cancel,
    Challenge,
    Generate,
    Hello,
    Leg,
    LegEnded,
    LegStarted,
    Ping,
    Pong,
    Prefill,
    Refused,
    StepOutput,
    Stop,
    TransferPair,
    Warm,
    Welcome,
    WorkerGauges,
    WorkerRole,
)
from worker.token_runs import FinishReason, TokenLogprob, TokenRun

FAKE_TOKEN = "test-cluster-token"  # a name both ends agree on, not a secret

TokenFunction = Callable[[npt.NDArray[np.int32], int, int, int], int]
"""(prompt, seed, choice, output index) -> token id."""


@dataclass
class FakeScript:
    """How a fake worker behaves; may be changed while it runs."""

    token: TokenFunction = fake_token
    cached_tokens: int | None = None
    """Reported prefix hit; None computes it from the prompts this worker has seen, in whole
    blocks.
    """
    prefill_s: float = 0.0
    linger_s: float = 0.0
    """Pause of a context leg between its first tokens and the hand-over."""
    step_s: float = 0.0
    """Pause before every decode step: what the inter-token latency will be."""
    bytes_per_token: int = 100
    """Transferred bytes reported for every token that a generation leg received."""
    output_delay_s: float = 0.0
    """Every message of this worker reaches the front end this much later, in order."""
    silent: bool = False
    """Answer no pings and send nothing, like a stopped process."""
    failures: list[LegEnded] = field(default_factory=list)
    """The next legs end with these (request id and leg are filled in) instead of being served."""
    decode_gate: asyncio.Event | None = None
    """When set, output index 1 and after wait for it."""
    ready: bool = True
    warms: bool = True
    """Whether pairs that it is told to warm get connected."""


Handover = Literal["pages", "no_decode", "lost"]


class FakeTransfers:
    """What became of each request between a context and a generation worker."""

    def __init__(self) -> None:
        self._handed: dict[str, asyncio.Future[Handover]] = {}

    def outcome(self, request_id: str) -> asyncio.Future[Handover]:
        """Resolves when the pages are handed over, are not needed, or never will be."""
        if request_id not in self._handed:
            self._handed[request_id] = asyncio.get_running_loop().create_future()
        return self._handed[request_id]

    def settle(self, request_id: str, handover: Handover) -> None:
        """First settlement wins."""
        future = self.outcome(request_id)
        if not future.done():
            future.set_result(handover)


class _Connection:
    """One front end: its writer and the outbox that keeps messages in order behind the scripted
    delay.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.legs: dict[tuple[str, Leg], asyncio.Task[None]] = {}
        self.stops: dict[str, dict[int, int]] = {}
        self.cancelled: set[str] = set()


class FakeWorker:
    """One instance. ``start`` returns the address that a membership update carries."""

    def __init__(
        self,
        instance: str,
        role: WorkerRole,
        *,
        script: FakeScript | None = None,
        transfers: FakeTransfers | None = None,
        cluster_token: str = FAKE_TOKEN,
        model: str = "fake-model",
        limits: tuple[int, int, int] = (4096, FAKE_VOCAB_SIZE, 64),
    ) -> None:
        """``limits`` are max_sequence_tokens, vocab_size and tokens_per_block."""
        self.script = script or FakeScript()
        self.role: WorkerRole = role
        self.incarnation = Incarnation.mint(instance)
        self.received: list[Prefill | Generate | Cancel | Stop] = []
        self.introduced: tuple[PeerAddress, ...] = ()
        """The context workers that the last :class:`Warm` named."""
        self.active = 0
        """Legs being served now."""
        self.transfers = transfers
        self._cluster_token = cluster_token
        self._model = model
        self._max_sequence_tokens, self._vocab_size, self._tokens_per_block = limits
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._totals = {"prefill": 0, "decode": 0, "cached": 0, "bytes": 0, "steps": 0}
        self._port = 0
        self._fault: FrameError | None = None
        """What a front end sent that no front end may send."""

    async def start(self) -> WorkerAddress:
        """Listen on a free port of the loopback interface (the same one after a :meth:`kill`)."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self.address()

    def address(self) -> WorkerAddress:
        """Address of the current incarnation."""
        return WorkerAddress(
            incarnation=self.incarnation, role=self.role, host="127.0.0.1", port=self._port, pid=1
        )

    async def kill(self) -> None:
        """Die at once: listeners and connections are closed without another message.

        Raises AssertionError when a front end sent what it may not.
        """
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            await self._end_legs(connection)
            connection.writer.transport.abort()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        if self._fault is not None:
            raise AssertionError("a front end broke the protocol") from self._fault

    async def restart(self) -> WorkerAddress:
        """Come back as a new incarnation with an empty cache, as a supervisor would start it."""
        await self.kill()
        self.incarnation = Incarnation.mint(self.incarnation.instance)
        self._seen.clear()
        self.introduced = ()
        self._totals = dict.fromkeys(self._totals, 0)
        return await self.start()

    async def __aenter__(self) -> FakeWorker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _end_legs(self, connection: _Connection) -> None:
        tasks = tuple(connection.legs.values())
        for (request_id, leg), task in tuple(connection.legs.items()):
            if leg == "context" and self.transfers is not None:
                self.transfers.settle(request_id, "lost")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            if await self._handshake(reader, writer):
                self._send(connection, StepOutput(gauges=self._gauges()))
                while True:
                    message = await FRONT_END_CODEC.read(reader)
                    self._receive(connection, message)
        except FrameError as error:
            self._fault = error
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the front end is gone
        finally:
            await self._end_legs(connection)
            self._connections.discard(connection)
            writer.close()

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = mint_nonce()
        WORKER_CODEC.write(writer, (Challenge(nonce=nonce),))
        hello = await FRONT_END_CODEC.read(reader)
        if not isinstance(hello, Hello):
            raise FrameError(f"expected hello, got {hello.kind}")
        try:
            check_proof(self._cluster_token, b"front-end", nonce, hello.proof)
        except AuthenticationError as error:
            WORKER_CODEC.write(writer, (Refused(reason=str(error)),))
            await writer.drain()
            return False
        welcome = Welcome(
            proof=proof(self._cluster_token, b"worker", hello.nonce),
            incarnation=self.incarnation,
            role=self.role,
            model=self._model,
            tokens_per_block=self._tokens_per_block,
            max_sequence_tokens=self._max_sequence_tokens,
            vocab_size=self._vocab_size,
            peer=PeerAddress(incarnation=self.incarnation, host="127.0.0.1", control_port=1),
            transport="fake",
            kv_dtype="float32",
        )
        WORKER_CODEC.write(writer, (welcome,))
        return True

    def _receive(self, connection: _Connection, message: object) -> None:
        match message:
            case Ping():
                self._send(connection, Pong(sent_ms=message.sent_ms, engine_age_ms=0))
            case Prefill():
                self.received.append(message)
                self._begin(connection, message, "context", self._context_leg(connection, message))
            case Generate():
                self.received.append(message)
                self._begin(
                    connection, message, "generation", self._generation_leg(connection, message)
                )
            case Warm():
                self.introduced = message.peers
                self.tell_gauges()
            case Cancel():
                self.received.append(message)
                self._cancel(connection, message.request_id)
            case Stop():
                self.received.append(message)
                connection.stops.setdefault(message.request_id, {})[message.choice] = message.index
            case _:
                raise FrameError(f"unexpected message {message!r}")

    def _begin(
        self,
        connection: _Connection,
        message: Prefill | Generate,
        leg: Leg,
        work: Coroutine[object, object, None],
    ) -> None:
        request_id = message.request_id
        if request_id in connection.cancelled:
            work.close()
            self._end(
                connection, request_id, leg, LegEnded(request_id="", leg=leg, outcome="cancelled")
            )
            return
        if self.script.failures:
            work.close()
            self._end(connection, request_id, leg, self.script.failures.pop(0))
            return
        self.active += 1
        task = asyncio.get_running_loop().create_task(work)
        connection.legs[request_id, leg] = task

        def finished(_: asyncio.Task[None]) -> None:
            self.active -= 1
            connection.legs.pop((request_id, leg), None)

        task.add_done_callback(finished)

    def _cancel(self, connection: _Connection, request_id: str) -> None:
        connection.cancelled.add(request_id)
        for leg in ("context", "generation"):
            task = connection.legs.pop((request_id, leg), None)
            if task is None:
                continue
            task.cancel()
            if leg == "context" and self.transfers is not None:
                self.transfers.settle(request_id, "lost")
            self._end(
                connection, request_id, leg, LegEnded(request_id="", leg=leg, outcome="cancelled")
            )

    def _send(self, connection: _Connection, message: StepOutput | Pong) -> None:
        if self.script.silent or connection.writer.is_closing():
            return
        frame = WORKER_CODEC.encode(message)
        delay_s = self.script.output_delay_s
        if delay_s == 0.0:
            connection.writer.write(frame)
            return

        def deliver() -> None:
            if not connection.writer.is_closing():
                connection.writer.write(frame)

        asyncio.get_running_loop().call_later(delay_s, deliver)

    def _end(self, connection: _Connection, request_id: str, leg: Leg, ended: LegEnded) -> None:
        if leg == "context" and self.transfers is not None:
            self.transfers.settle(request_id, "pages" if ended.outcome == "succeeded" else "lost")
        filled = ended.model_copy(update={"request_id": request_id, "leg": leg})
        self._send(connection, StepOutput(ended=(filled,), gauges=self._gauges()))

    def _match(self, message: Prefill | Generate) -> int:
        """Tokens of the longest known prefix in whole blocks, never the whole prompt."""
        if self.script.cached_tokens is not None:
            return self.script.cached_tokens
        prompt, step = message.tokens, 4 * self._tokens_per_block
        matched = 0
        for end in range(step, len(prompt) + 1, step):
            key = message.scope + b"\0" + prompt[:end]
            if key not in self._seen:
                break
            matched = end // 4
        return min(
            matched, max(0, len(prompt) // 4 - 1) // self._tokens_per_block * self._tokens_per_block
        )

    def _remember(self, scope: bytes, tokens: bytes) -> None:
        step = 4 * self._tokens_per_block
        for end in range(step, len(tokens) + 1, step):
            self._seen[scope + b"\0" + tokens[:end]] = None

    def _started(self, connection: _Connection, message: Prefill | Generate, leg: Leg) -> int:
        cached = self._match(message)
        self._totals["cached"] += cached
        started = LegStarted(
            request_id=message.request_id,
            leg=leg,
            prompt_tokens=len(message.tokens) // 4,
            cached_tokens=cached,
        )
        self._send(connection, StepOutput(started=(started,)))
        return cached

    def _run(
        self, message: Prefill | Generate, choice: int, index: int
    ) -> tuple[TokenRun, FinishReason | None]:
        prompt = unpack_ints(message.tokens)
        token = self.script.token(prompt, message.sampling.seed, choice, index)
        finish: FinishReason | None = None
        if token in message.stop.stop_token_ids:
            finish = "stop"
        elif index + 1 >= message.stop.max_tokens:
            finish = "length"
        logprobs: tuple[TokenLogprob, ...] = ()
        if message.sampling.logprobs is not None:
            top = tuple((token + rank, -1.0 - rank) for rank in range(message.sampling.logprobs))
            logprobs = (TokenLogprob(logprob=-1.0, top=top),)
        run = TokenRun(
            request_id=message.request_id,
            choice=choice,
            start=index,
            tokens=pack_ints((token,)),
            logprobs=logprobs,
            finish=finish,
        )
        return run, finish

    async def _context_leg(self, connection: _Connection, message: Prefill) -> None:
        cached = self._started(connection, message, "context")
        await asyncio.sleep(self.script.prefill_s)
        computed = len(message.tokens) // 4 - cached
        self._totals["prefill"] += computed
        self._remember(message.scope, message.tokens)
        runs = [self._run(message, choice, 0) for choice in range(message.n)]
        self._send(
            connection, StepOutput(runs=tuple(run for run, _ in runs), gauges=self._gauges())
        )
        await asyncio.sleep(self.script.linger_s)
        if self.transfers is not None and all(finish is not None for _, finish in runs):
            self.transfers.settle(message.request_id, "no_decode")
        ended = LegEnded(request_id="", leg="context", outcome="succeeded", prefill_tokens=computed)
        self._end(connection, message.request_id, "context", ended)

    async def _generation_leg(self, connection: _Connection, message: Generate) -> None:
        cached = self._started(connection, message, "generation")
        received, computed = 0, 0
        request_id = message.request_id
        if message.source is None:
            await asyncio.sleep(self.script.prefill_s)
            computed = len(message.tokens) // 4 - cached
        else:
            handover: Handover = "pages"
            if self.transfers is not None:
                handover = await self.transfers.outcome(request_id)
            if handover != "pages":
                ended = LegEnded(request_id="", leg="generation", outcome="succeeded")
                if handover == "lost":
                    ended = ended.model_copy(
                        update={"outcome": "failed", "code": "peer_lost", "retryable": True}
                    )
                self._end(connection, request_id, "generation", ended)
                return
            received = (len(message.tokens) // 4 - cached) * self.script.bytes_per_token
        self._totals["prefill"] += computed
        self._totals["bytes"] += received
        self._remember(message.scope, message.tokens)
        await self._decode(connection, message)
        ended = LegEnded(
            request_id="",
            leg="generation",
            outcome="succeeded",
            transferred_bytes=received,
            prefill_tokens=computed,
        )
        self._end(connection, request_id, "generation", ended)

    async def _decode(self, connection: _Connection, message: Generate) -> None:
        emitted = [len(unpack_ints(tokens)) for tokens in message.emitted] or [0] * message.n
        going = [choice for choice in range(message.n) if choice not in message.finished]
        index = [emitted[choice] for choice in range(message.n)]
        while going:
            if any(index[choice] for choice in going):
                if self.script.decode_gate is not None:
                    await self.script.decode_gate.wait()
                await asyncio.sleep(self.script.step_s)
            stops = connection.stops.get(message.request_id, {})
            going = [choice for choice in going if index[choice] < stops.get(choice, 1 << 62)]
            runs: list[TokenRun] = []
            for choice in tuple(going):
                run, finish = self._run(message, choice, index[choice])
                runs.append(run)
                index[choice] += 1
                self._totals["decode"] += 1
                if finish is not None:
                    going.remove(choice)
            self._totals["steps"] += 1
            if runs:
                self._send(connection, StepOutput(runs=tuple(runs), gauges=self._gauges()))
            await asyncio.sleep(0)

    def tell_gauges(self) -> None:
        """Tell every front end, after a change of the script."""
        for connection in self._connections:
            self._send(connection, StepOutput(gauges=self._gauges()))

    def _pair(self, peer: PeerAddress) -> TransferPair:
        lane, reason = ("fake", "") if self.script.warms else ("", "scripted")
        return TransferPair(
            side="generation", peer=peer.incarnation, rank=peer.rank, lane=lane, reason=reason
        )

    def _gauges(self) -> WorkerGauges:
        return IDLE_GAUGES.model_copy(
            update={
                "ready": self.script.ready,
                "reason": "" if self.script.ready else "scripted",
                "cached_blocks": len(self._seen),
                "running": self.active,
                "prefill_tokens_total": self._totals["prefill"],
                "decode_tokens_total": self._totals["decode"],
                "cached_tokens_total": self._totals["cached"],
                "transferred_bytes_total": self._totals["bytes"],
                "steps_total": self._totals["steps"],
                "pairs": tuple(self._pair(peer) for peer in self.introduced),
            }
        )
