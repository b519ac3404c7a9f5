"""What is shown, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from typing_extensions import override

from services.terminal import LiveTerminal, PlainTerminal, open_terminal


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


def test_the_cursor_comes_back_whatever_happens() -> None:
    stream = FakeTty()

    def work() -> None:
        with open_terminal(stream) as terminal:
            terminal.update("model", "loading")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")
