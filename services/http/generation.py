"""One HTTP request running in the cluster: its prompts, their streams, their text.

Invariant: whoever holds a :class:`Generation` closes it; closing cancels every stream that still
runs. Choices are numbered through: choice ``c`` of prompt ``p`` is ``p * n + c``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.http.assembly import (
    ChoiceDelta,
    ChoiceText,
    InconsistentEvents,
    PromptText,
    TextRule,
)
from services.http.errors import of_failure
from services.orchestration.api import (
    ChoiceFinished,
    Completed,
    Failed,
    GenerationRequest,
    GenerationService,
    OutputEvent,
    OutputStream,
    TokenDelta,
)
from services.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Usage:
    """Counts of a request that came to its end."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    transferred_bytes: int
    repaired: bool


class Generation:
    """Deltas of a request in the order in which they come, over all its prompts.

    ``await next_delta()`` until it returns None; then :attr:`usage` holds.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        streams: Sequence[OutputStream],
        texts: Sequence[PromptText],
    ) -> None:
        self._requests = requests
        self._streams = streams
        self._texts = texts
        self._ends: list[Completed | None] = [None] * len(streams)
        self._waiting: dict[asyncio.Task[OutputEvent], int] = {}
        self._open = set(range(len(streams)))

    @classmethod
    async def start(
        cls,
        service: GenerationService,
        requests: Sequence[GenerationRequest],
        rule: TextRule,
        detokenizers: Sequence[Sequence[Detokenizer]],
    ) -> Generation:
        """Submit every request, or none: Raises what ``submit`` raises.

        ``detokenizers`` holds one for each choice of each request.
        """
        streams: list[OutputStream] = []
        try:
            for request in requests:
                streams.append(await service.submit(request))
        except BaseException:
            await _close(streams)
            raise
        texts = [
            PromptText(tuple(ChoiceText(at, each, rule) for at, each in enumerate(row)))
            for row in detokenizers
        ]
        return cls(requests, streams, texts)

    @property
    def choices(self) -> int:
        """Choices of all prompts together."""
        return sum(request.n for request in self._requests)

    @property
    def usage(self) -> Usage:
        """Counts; to be read after the last delta."""
        ends = [end for end in self._ends if end is not None]
        return Usage(
            prompt_tokens=sum(len(request.tokens) for request in self._requests),
            completion_tokens=sum(text.completion_tokens for text in self._texts),
            cached_tokens=sum(end.cached_tokens for end in ends),
            transferred_bytes=sum(end.transferred_bytes for end in ends),
            repaired=any(end.repaired for end in ends),
        )

    async def wait_for_event(self, timeout_s: float) -> None:
        """Return when an event is there, or after ``timeout_s``; takes nothing."""
        self._ask()
        await asyncio.wait(self._waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def raise_early_failure(self) -> None:
        """Raise ApiError when a stream that was waited for failed as its first event."""
        for task in self._waiting:
            if task.done() and isinstance(event := task.result(), Failed):
                raise of_failure(event)

    async def next_delta(self) -> ChoiceDelta | None:
        """The next delta; None at the end.

        Raises ApiError when the cluster gave up, InconsistentEvents when it contradicts itself.
        """
        while self._open:
            prompt, event = await self._next_event()
            delta = self._handle(prompt, event)
            if delta is not None:
                return delta
        return None

    async def aclose(self) -> None:
        """Cancel what still runs. Idempotent."""
        for task in self._waiting:
            task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._waiting.clear()
        await _close(self._streams)

    async def _next_event(self) -> tuple[int, OutputEvent]:
        if not self._waiting and len(self._open) == 1:
            # One stream: no task, no set, just its next event.
            (prompt,) = self._open
            return prompt, await _event(self._streams[prompt])
        self._ask()
        await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        # The stream that has waited longest comes first, so that none is left behind.
        task = next(task for task in self._waiting if task.done())
        return self._waiting.pop(task), task.result()

    def _ask(self) -> None:
        """Wait for the next event of every open stream."""
        for prompt in self._open.difference(self._waiting.values()):
            self._waiting[asyncio.ensure_future(_event(self._streams[prompt]))] = prompt

    def _handle(self, prompt: int, event: OutputEvent) -> ChoiceDelta | None:
        text = self._texts[prompt]
        match event:
            case TokenDelta() | ChoiceFinished():
                delta = text.handle(event)
                if delta is None:
                    return None
                if delta.stop_index is not None:
                    self._streams[prompt].stop(delta.choice, delta.stop_index)
                first = prompt * self._requests[prompt].n
                return replace(delta, choice=first + delta.choice) if first else delta
            case Completed():
                if not text.is_finished:
                    raise InconsistentEvents("request completed before every choice finished")
                self._ends[prompt] = event
            case Failed():
                if not text.is_finished:
                    raise of_failure(event)
                # The client has the whole answer: what broke afterwards is not its concern.
        self._open.discard(prompt)
        return None


async def _event(stream: OutputStream) -> OutputEvent:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise InconsistentEvents("stream ended without a terminal event") from None


async def _close(streams: Sequence[OutputStream]) -> None:
    for stream in streams:
        await stream.aclose()
