"""A GenerationService that plays scripts: what HTTP tests put in the place of a cluster.

A script is a list of steps for one request: events to deliver and asyncio events to wait for. The
stream behaves as the real one does where endpoints can tell: a stopped choice gets no more tokens
and finishes with ``stop``, closing cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from services.orchestration.api import (
    ChoiceFinished,
    Completed,
    Failed,
    FinishReason,
    GenerationRequest,
    GenerationService,
    ModelLimits,
    OutputEvent,
    OutputStream,
    Readiness,
    TokenDelta,
    TokenLogprob,
)

Step = OutputEvent | asyncio.Event
Script = Callable[[GenerationRequest], Sequence[Step]]


def answer(
    request: GenerationRequest,
    choices: Sequence[Sequence[int]],
    reason: FinishReason = "stop",
    *,
    cached_tokens: int = 0,
    transferred_bytes: int = 0,
) -> list[Step]:
    """Steps of a request that goes well: tokens of all choices by turns, one at a time."""
    steps: list[Step] = []
    for index in range(max(map(len, choices))):
        for choice, tokens in enumerate(choices):
            if index < len(tokens):
                logprobs = (logprob_of(tokens[index], request),) if with_logprobs(request) else ()
                steps.append(TokenDelta(choice, index, (tokens[index],), logprobs))
    steps += [ChoiceFinished(choice, reason) for choice in range(len(choices))]
    steps.append(
        Completed(
            prompt_tokens=len(request.tokens),
            cached_tokens=cached_tokens,
            completion_tokens=tuple(map(len, choices)),
            transferred_bytes=transferred_bytes,
        )
    )
    return steps


def with_logprobs(request: GenerationRequest) -> bool:
    """Whether the request asks for log-probabilities."""
    return request.sampling.logprobs is not None


def logprob_of(token: int, request: GenerationRequest) -> TokenLogprob:
    """A made-up log-probability; the alternatives are the token itself and its neighbours."""
    count = request.sampling.logprobs or 0
    return TokenLogprob(
        logprob=-0.5, top=tuple((token + rank, -0.5 - rank) for rank in range(count))
    )


class ScriptedStream(OutputStream):
    """One request's script being played."""

    def __init__(self, request: GenerationRequest, steps: Sequence[Step]) -> None:
        self.request = request
        self.stops: list[tuple[int, int]] = []
        self.closed = asyncio.Event()
        self.is_over = False
        self._events = self._play(steps)
        self._counts = [0] * request.n

    @property
    @override
    def request_id(self) -> str:
        return f"scripted-{id(self)}"

    @property
    def was_cancelled(self) -> bool:
        """Closed before its terminal event was read."""
        return self.closed.is_set() and not self.is_over

    @override
    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    @override
    async def __anext__(self) -> OutputEvent:
        return await anext(self._events)

    @override
    def stop(self, choice: int, index: int) -> None:
        self.stops.append((choice, index))

    @override
    async def aclose(self) -> None:
        self.closed.set()
        await self._events.aclose()

    async def _play(self, steps: Sequence[Step]) -> AsyncGenerator[OutputEvent, None]:
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            stopped = {choice for choice, _ in self.stops}
            match step:
                case TokenDelta() if step.choice in stopped:
                    continue
                case TokenDelta():
                    self._counts[step.choice] = step.index + len(step.tokens)
                case ChoiceFinished() if step.choice in stopped:
                    step = ChoiceFinished(step.choice, "stop")
                case Completed():
                    limits = dict(self.stops)
                    counts = [limits.get(at, count) for at, count in enumerate(self._counts)]
                    step = replace(step, completion_tokens=tuple(counts))
                case _:
                    pass
            self.is_over = isinstance(step, Completed | Failed)
            yield step


@dataclass
class ScriptedService(GenerationService):
    """Answers every request by ``script``; an exception in ``refusal`` is raised instead."""

    script: Script
    model_limits: ModelLimits
    refusal: Exception | None = None
    state: Readiness = field(default_factory=lambda: Readiness(True, (), ()))  # noqa: FBT003
    streams: list[ScriptedStream] = field(default_factory=list)

    @property
    def requests(self) -> list[GenerationRequest]:
        """Everything that was submitted."""
        return [stream.request for stream in self.streams]

    @override
    async def submit(self, request: GenerationRequest) -> OutputStream:
        if self.refusal is not None:
            raise self.refusal
        stream = ScriptedStream(request, self.script(request))
        self.streams.append(stream)
        return stream

    @override
    def limits(self) -> ModelLimits:
        return self.model_limits

    @override
    def readiness(self) -> Readiness:
        return self.state
