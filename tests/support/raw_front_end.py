"""A front end without orchestration: connects to workers and says exactly what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_workers import HOST, AnyWorker, start_afresh, start_forked
from transfer.auth import check_proof, mint_nonce, proof
from transfer.identity import Incarnation
from transfer.wire import unpack_ints
from worker.config import WorkerAddress, WorkerConfig
from worker.messages import (
    FRONT_END_CODEC,
    WORKER_CODEC,
    Cancel,
    Challenge,
    Generate,
    Hello,
    LegEnded,
    LegStarted,
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
from worker.token_runs import TokenLogprob

ANSWER_TIMEOUT_S = 60.0


@dataclass
class RawChoice:
    """Output of one choice as this connection heard it."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def output(self) -> list[int]:
        """Tokens in order, which must have no gap."""
        assert sorted(self.tokens) == list(range(len(self.tokens))), sorted(self.tokens)
        return [self.tokens[index] for index in range(len(self.tokens))]


class RawFrontEnd:
    """One connection to one worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.welcome: Welcome | None = None
        self.choices: dict[tuple[str, int], RawChoice] = {}
        self.placed: dict[str, int] = {}
        """Rank of each context leg, where ranks have requests of their own."""
        self.started: dict[str, LegStarted] = {}
        self.ended: dict[str, list[LegEnded]] = {}
        self.gauges: WorkerGauges | None = None
        self.pongs: list[Pong] = []
        self.gone = False
        self.refused = ""

    @classmethod
    async def connect(cls, address: WorkerAddress, cluster_token: str) -> RawFrontEnd:
        """Shake hands."""
        reader, writer = await asyncio.open_connection(address.host, address.port)
        front_end = cls(reader, writer)
        challenge = await WORKER_CODEC.read(reader)
        assert isinstance(challenge, Challenge)
        nonce = mint_nonce()
        answer = proof(cluster_token, b"front-end", challenge.nonce)
        front_end.send(Hello(front_end="test", proof=answer, nonce=nonce))
        welcome = await WORKER_CODEC.read(reader)
        assert isinstance(welcome, Welcome), welcome
        check_proof(cluster_token, b"worker", nonce, welcome.proof)
        front_end.welcome = welcome
        front_end._task = asyncio.create_task(front_end._listen())
        return front_end

    def send(self, message: Hello | Prefill | Generate | Cancel | Stop | Warm | Ping) -> None:
        """Say something."""
        FRONT_END_CODEC.write(self._writer, (message,))

    def send_raw(self, data: bytes) -> None:
        """Say something that may be no message."""
        self._writer.write(data)

    def pause(self) -> None:
        """Stop reading, as a front end that hangs does."""
        if self._task is not None:
            self._task.cancel()
        transport = self._writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()

    async def _listen(self) -> None:
        try:
            while True:
                message = await WORKER_CODEC.read(self._reader)
                if isinstance(message, StepOutput):
                    self._hear(message)
                elif isinstance(message, Pong):
                    self.pongs.append(message)
                elif isinstance(message, Refused):
                    self.refused = message.reason
                self._changed.set()
        except (asyncio.IncompleteReadError, OSError):
            self.gone = True
            self._changed.set()

    def _hear(self, output: StepOutput) -> None:
        for placed in output.placed:
            self.placed[placed.request_id] = placed.rank
        for started in output.started:
            self.started[started.request_id] = started
        for run in output.runs:
            choice = self.choices.setdefault((run.request_id, run.choice), RawChoice())
            for offset, token in enumerate(unpack_ints(run.tokens).tolist()):
                assert run.start + offset not in choice.tokens, "a worker repeats itself"
                choice.tokens[run.start + offset] = token
            choice.logprobs += run.logprobs
            choice.finish = run.finish or choice.finish
        for ended in output.ended:
            self.ended.setdefault(ended.request_id, []).append(ended)
        self.gauges = output.gauges or self.gauges

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the worker will say. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, request_id: str) -> LegEnded:
        """The one terminal event of a request's leg here."""
        await self.until(lambda: self.ended.get(request_id))
        events = self.ended[request_id]
        assert len(events) == 1, events
        return events[0]

    async def idle(self) -> WorkerGauges:
        """Gauges once nothing is going on any more."""

        def at_rest() -> bool:
            gauges = self.gauges
            return gauges is not None and not (
                gauges.running
                or gauges.waiting
                or gauges.suspended
                or gauges.transfers_in_flight
                or gauges.free_blocks != gauges.total_blocks
            )

        await self.until(at_rest)
        assert self.gauges is not None
        return self.gauges

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass
class WorkerRun:
    """A ``worker.host`` process."""

    process: AnyWorker
    address: WorkerAddress

    def hear_of_death(self, incarnation: Incarnation) -> None:
        """Tell it that the process of another worker is dead."""
        assert self.process.stdin is not None
        self.process.stdin.write(incarnation.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()

    def stop(self) -> int:
        """Ask it to end; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(20)


def start_workers(
    configs: Sequence[WorkerConfig],
    logs: Path,
    module: str = "worker.host",
    *,
    afresh: bool = False,
) -> list[WorkerRun]:
    """Start ``module`` once for each configuration, forked or in new interpreters, and wait for the
    addresses.
    """
    start = start_afresh if afresh else start_forked
    started = []
    for one in configs:
        log = logs / f"{one.incarnation}-{one.rank}.log"
        with log.open("wb") as file:
            process = start(module, *HOST[1:], stderr=file)
        assert process.stdin is not None
        process.stdin.write(one.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        started.append((process, log))
    return [_address_of(process, log) for process, log in started]


def _address_of(process: AnyWorker, log: Path) -> WorkerRun:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the worker did not start: {log.read_text()}"
    return WorkerRun(process, WorkerAddress.model_validate(json.loads(line)))
