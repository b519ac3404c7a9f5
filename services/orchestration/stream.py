"""The reader's end of one request: a buffer of its own, bounded by what the request may produce."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Protocol

from typing_extensions import override

from services.orchestration.api import (
    ChoiceFinished,
    Completed,
    Failed,
    OutputEvent,
    OutputStream,
    TokenDelta,
)


class StreamControl(Protocol):
    """What a reader may ask of its request."""

    def stop(self, request_id: str, choice: int, index: int) -> None:
        """End a choice."""

    def cancel(self, request_id: str) -> None:
        """End the request; unknown and ended ones are ignored."""


class RequestStream(OutputStream):
    """Events between one request and its reader, in order.

    A stop takes effect at once, also on events that are buffered already. Deltas of one choice that
    follow each other in the buffer are handed out as one, so a slow reader catches up.
    """

    def __init__(self, request_id: str, control: StreamControl) -> None:
        self._request_id = request_id
        self._control = control
        self._buffer: deque[OutputEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._stops: dict[int, int] = {}
        self._over = False

    @property
    @override
    def request_id(self) -> str:
        return self._request_id

    def push(self, event: OutputEvent) -> None:
        """Hand over one event; dropped when the reader has closed."""
        if self._over:
            return
        self._buffer.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @override
    def __aiter__(self) -> RequestStream:
        return self

    @override
    async def __anext__(self) -> OutputEvent:
        while True:
            while self._buffer:
                event = self._visible(self._buffer.popleft())
                if event is not None:
                    return event
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @override
    def stop(self, choice: int, index: int) -> None:
        self._stops[choice] = min(index, self._stops.get(choice, index))
        self._control.stop(self._request_id, choice, index)

    @override
    async def aclose(self) -> None:
        self._over = True
        self._buffer.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._control.cancel(self._request_id)

    def _visible(self, event: OutputEvent) -> OutputEvent | None:
        """``event`` as the reader's stops leave it; None when nothing is left."""
        match event:
            case TokenDelta():
                return self._before_stop(self._merged(event))
            case ChoiceFinished():
                return replace(event, reason="stop") if event.choice in self._stops else event
            case Completed():
                self._over = True
                counts = event.completion_tokens
                clipped = (min(n, self._stops.get(c, n)) for c, n in enumerate(counts))
                return replace(event, completion_tokens=tuple(clipped))
            case Failed():
                self._over = True
                return event

    def _merged(self, delta: TokenDelta) -> TokenDelta:
        """``delta`` with the deltas of the same choice that follow it directly."""
        if not self._buffer:
            return delta
        tokens, logprobs = list(delta.tokens), list(delta.logprobs)
        while self._buffer:
            following = self._buffer[0]
            if not isinstance(following, TokenDelta) or following.choice != delta.choice:
                break
            self._buffer.popleft()
            tokens.extend(following.tokens)
            logprobs.extend(following.logprobs)
        return TokenDelta(delta.choice, delta.index, tuple(tokens), tuple(logprobs))

    def _before_stop(self, delta: TokenDelta) -> TokenDelta | None:
        limit = self._stops.get(delta.choice)
        if limit is None or delta.index + len(delta.tokens) <= limit:
            return delta
        keep = limit - delta.index
        if keep <= 0:
            return None
        return TokenDelta(delta.choice, delta.index, delta.tokens[:keep], delta.logprobs[:keep])
