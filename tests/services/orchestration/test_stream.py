"""The reader's end: order, stops on what is buffered, closing."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestration.api import ChoiceFinished, Completed, OutputEvent, TokenDelta
from services.orchestration.stream import RequestStream


class Recorder:
    """Notes what the reader asks for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def stop(self, request_id: str, choice: int, index: int) -> None:
        self.asked.append(("stop", request_id, choice, index))

    def cancel(self, request_id: str) -> None:
        self.asked.append(("cancel", request_id))


async def read(stream: RequestStream) -> list[OutputEvent]:
    return [event async for event in stream]


async def test_buffered_deltas_of_a_choice_are_merged_for_a_slow_reader() -> None:
    stream = RequestStream("r", Recorder())
    stream.push(TokenDelta(0, 0, (1,)))
    stream.push(TokenDelta(0, 1, (2, 3)))
    stream.push(TokenDelta(1, 0, (9,)))
    stream.push(Completed(1, 0, (3, 1)))
    assert await read(stream) == [
        TokenDelta(0, 0, (1, 2, 3)),
        TokenDelta(1, 0, (9,)),
        Completed(1, 0, (3, 1)),
    ]


async def test_a_stop_acts_on_what_is_buffered() -> None:
    recorder = Recorder()
    stream = RequestStream("r", recorder)
    stream.push(TokenDelta(0, 0, (1, 2)))
    stream.push(TokenDelta(1, 0, (7,)))
    stream.push(TokenDelta(0, 2, (3,)))
    stream.push(ChoiceFinished(0, "length"))
    stream.push(Completed(4, 0, (3, 1)))
    stream.stop(0, 1)
    assert await read(stream) == [
        TokenDelta(0, 0, (1,)),
        TokenDelta(1, 0, (7,)),
        ChoiceFinished(0, "stop"),
        Completed(4, 0, (1, 1)),
    ]
    assert recorder.asked == [("stop", "r", 0, 1)]


async def test_closing_wakes_a_waiting_reader_and_cancels() -> None:
    recorder = Recorder()
    stream = RequestStream("r", recorder)
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader == []
    stream.push(TokenDelta(0, 0, (1,)))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert recorder.asked == [("cancel", "r")]
