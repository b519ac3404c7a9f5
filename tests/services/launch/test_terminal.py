"""What is shown, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from typing_extensions import override

from services.terminal import LiveTerminal, PlainTerminal, bar, open_terminal
from worker.progress import BytesRead, share_in


class FakeTty(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_not_repeated() -> None:
    stream = io.StringIO()
    with open_terminal(stream) as terminal:
        assert isinstance(terminal, PlainTerminal)
        terminal.update("model", "loading")
        terminal.update("model", "loading")
        terminal.update("ray", "starting")
        terminal.done("model", "loaded")
        terminal.line("served")
    assert stream.getvalue().splitlines() == [
        "model: loading",
        "ray: starting",
        "model: loaded",
        "served",
    ]


def plain(stream: io.StringIO) -> str:
    """What is written, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_terminal_keeps_what_is_done_and_is_left_alone_when_nothing_is_at_work() -> None:
    stream = FakeTty()
    with open_terminal(stream) as terminal:
        assert isinstance(terminal, LiveTerminal)
        terminal.update("model", "loading")
        terminal.update("ray", "starting")
        terminal.done("model", "loaded [1]")
        terminal.done("ray", "up")
        assert "✓ model: loaded [1]" in plain(stream)
        assert "✓ ray: up" in plain(stream)
        before = len(stream.getvalue())
        terminal.line("served [on 8000]")
        assert stream.getvalue()[before:] == "served [on 8000]\n"


def test_a_share_of_something_is_a_bar_on_a_terminal_and_a_line_elsewhere() -> None:
    log, drawn = io.StringIO(), io.StringIO()
    with open_terminal(log) as terminal:
        for line in lines():
            terminal.update("context-0", line)
            Console(file=drawn, width=80).print(bar(line), bar("warming up"))
    assert drawn.getvalue().count("━") == 12
    assert log.getvalue().splitlines() == [
        "context-0: reading weights, 500 of 1000 MB (50 %), 125 MB/s"
    ]


def lines() -> list[str]:
    """What is told of 500 MB in four seconds, by bytes that come every second."""
    told: list[str] = []
    seconds = iter(range(10))
    read = BytesRead("reading weights,", 10**9, told.append, lambda: 2 * next(seconds))
    read.add(0)
    told.clear()
    read.add(500 * 10**6)
    return told


def test_progress_is_told_seldom_and_at_the_end() -> None:
    told: list[str] = []
    seconds = iter((0.0, 0.5, 1.9, 2.0, 3.0, 3.5, 3.9))
    read = BytesRead("read", 6_000_000, told.append, lambda: next(seconds))
    for _ in range(6):
        read.add(1_000_000)
    assert told == ["read 3 of 6 MB (50 %), 2 MB/s", "read 6 of 6 MB (100 %), 2 MB/s"]
    assert [share_in(line) for line in told] == [0.5, 1.0]
    assert share_in("warming up") is None


def test_the_cursor_comes_back_whatever_happens() -> None:
    stream = FakeTty()

    def work() -> None:
        with open_terminal(stream) as terminal:
            terminal.update("model", "loading")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")
