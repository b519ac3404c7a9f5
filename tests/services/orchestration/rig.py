"""A service over fake workers, and readers that check the promises of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from services.orchestration.api import (
    ChoiceFinished,
    Completed,
    Failed,
    GenerationRequest,
    OutputStream,
    SamplingParams,
    StopRule,
    TokenDelta,
)
from services.orchestration.canary import CANARY_SCOPE, CanarySettings
from services.orchestration.service import Orchestrator, OrchestratorSettings
from services.orchestration.worker_link import LinkTimings
from tests.support.fake_tokens import fake_output
from tests.support.fake_worker import FAKE_TOKEN, FakeScript, FakeTransfers, FakeWorker
from worker.messages import Generate, Prefill

MessageT = TypeVar("MessageT")

CANARY = CanarySettings(idle_s=3600, retry_s=0.02, timeout_s=5)
FAST = LinkTimings(
    heartbeat_s=0.02, suspect_s=0.15, lost_s=0.4, connect_s=1.0, retry_s=0.02, max_retry_s=0.05
)


def make_settings(
    *,
    max_in_flight: int = 512,
    timings: LinkTimings = FAST,
    canary: CanarySettings = CANARY,
    expected_instances: tuple[str, ...] = (),
) -> OrchestratorSettings:
    """Settings whose time-outs suit a test."""
    return OrchestratorSettings(
        cluster_token=FAKE_TOKEN,
        max_in_flight=max_in_flight,
        timings=timings,
        canary=canary,
        expected_instances=expected_instances,
    )


def make_request(
    *,
    length: int = 10,
    max_tokens: int = 5,
    n: int = 1,
    deadline_ms: int = 20_000,
    conversation_id: str | None = None,
    stop_token_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    first: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        tokens=np.arange(first, first + length, dtype=np.int32) % 900,
        scope=b"scope",
        sampling=SamplingParams(seed=7, logprobs=logprobs),
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        deadline_ms=deadline_ms,
        n=n,
        conversation_id=conversation_id,
    )


class Collected:
    """A stream read to its end."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finished: dict[int, str] = {}
        self.terminal: Completed | Failed | None = None
        self.logprobs = 0
        self.offset = [0] * n
        """Tokens of each choice that were read before."""

    async def read(self, stream: OutputStream) -> Collected:
        async for event in stream:
            assert self.terminal is None
            match event:
                case TokenDelta():
                    assert event.index == self.offset[event.choice] + len(self.tokens[event.choice])
                    assert event.choice not in self.finished
                    self.tokens[event.choice].extend(event.tokens)
                    self.logprobs += len(event.logprobs)
                case ChoiceFinished():
                    assert event.choice not in self.finished
                    self.finished[event.choice] = event.reason
                case Completed() | Failed():
                    self.terminal = event
        assert self.terminal is not None
        return self

    def completed(self) -> Completed:
        assert isinstance(self.terminal, Completed), self.terminal
        return self.terminal

    def failed(self) -> Failed:
        assert isinstance(self.terminal, Failed), self.terminal
        return self.terminal


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that other tasks of this loop make true."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  made true by many tasks and by time
            await asyncio.sleep(0.002)


class Rig:
    """A service over fake workers."""

    def __init__(self, workers: Sequence[FakeWorker], settings: OrchestratorSettings) -> None:
        self.workers = list(workers)
        self.registry = CollectorRegistry()
        self.service = Orchestrator(settings, registry=self.registry)

    def publish(self) -> None:
        self.service.set_workers([worker.address() for worker in self.workers])

    async def ready(self) -> None:
        await until(lambda: self.service.readiness().ready)

    async def run(self, request: GenerationRequest) -> Collected:
        stream = await self.service.submit(request)
        return await Collected(request.n).read(stream)

    def story(self, request_id: str) -> tuple[str, ...]:
        """Transitions of a request that has not ended on every worker."""
        active = self.service._active.get(request_id)
        return () if active is None else active.flow.story

    def state(self, instance: str) -> str:
        """Of the link to a worker."""
        workers = self.service.readiness().workers
        return next((w.state for w in workers if w.instance == instance), "unknown")

    def ready_of(self, instance: str) -> bool:
        """Whether the worker accepts requests."""
        workers = self.service.readiness().workers
        return any(w.ready for w in workers if w.instance == instance)

    @property
    def repairs(self) -> float:
        """All of them, whatever the cause."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "pageferry_repairs_total"
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def received(self, kind: type[MessageT]) -> list[MessageT]:
        """What workers were sent, canaries aside."""
        received = [m for worker in self.workers for m in worker.received]
        return [
            message
            for message in received
            if isinstance(message, kind)
            and not (isinstance(message, Prefill | Generate) and message.scope == CANARY_SCOPE)
        ]

    async def idle(self) -> None:
        """Every flow forgotten, every reservation released."""
        await until(lambda: not self.service._active and not self.service._by_leg)
        assert self.service.in_flight == 0
        self.service.router.check()
        assert len(self.service.router.ledger) == 0


@asynccontextmanager
async def rig(
    workers: Sequence[FakeWorker], settings: OrchestratorSettings | None = None
) -> AsyncIterator[Rig]:
    """Ready when entered; when left, every request must be over and every reservation released."""
    settings = settings or make_settings()
    instances = tuple(worker.incarnation.instance for worker in workers)
    built = Rig(workers, replace(settings, expected_instances=instances))
    for worker in workers:
        await worker.start()
    await built.service.start()
    built.publish()
    try:
        await built.ready()
        for worker in workers:
            worker.received.clear()
        yield built
        await built.idle()
    finally:
        await built.service.close()
        for worker in workers:
            await worker.kill()


def pair(**scripts: FakeScript) -> list[FakeWorker]:
    transfers = FakeTransfers()
    return [
        FakeWorker("context-0", "context", script=scripts.get("context"), transfers=transfers),
        FakeWorker(
            "generation-0", "generation", script=scripts.get("generation"), transfers=transfers
        ),
    ]


def oracle(request: GenerationRequest) -> list[list[int]]:
    return [
        list(fake_output(request.tokens, request.sampling.seed, choice, request.stop.max_tokens))
        for choice in range(request.n)
    ]
