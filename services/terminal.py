"""What the person in front of the terminal sees while something takes its time.

On a terminal, one live line for every part that is at work; elsewhere (a log, a container) plain
lines. Everything goes to standard error: standard output is for results.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from worker.progress import share_in

BAR_WIDTH: Final = 24


class Terminal(Protocol):
    """Shows progress. Safe to call from any thread; a context manager around the time it is in
    use."""

    def update(self, part: str, text: str) -> None:
        """``part`` is at work and has come to ``text``."""

    def done(self, part: str, text: str) -> None:
        """``part`` has finished, with ``text``."""

    def line(self, text: str) -> None:
        """A line that stays."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_terminal(stream: TextIO = sys.stderr) -> Terminal:
    """The right kind for ``stream``."""
    return LiveTerminal(stream) if stream.isatty() else PlainTerminal(stream)


class PlainTerminal(Terminal):
    """One line an update; a repeated text is shown once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, str] = {}

    @override
    def update(self, part: str, text: str) -> None:
        if self._last.get(part) != text:
            self._last[part] = text
            self.line(f"{part}: {text}")

    @override
    def done(self, part: str, text: str) -> None:
        self.update(part, text)

    @override
    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to restore."""


class LiveTerminal(Terminal):
    """A live table of the parts at work, with the seconds each has taken; nothing while none is."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._spinner = Spinner("dots")
        self._parts: dict[str, tuple[str, float]] = {}
        self._live: Live | None = None
        self._lock = threading.RLock()

    @override
    def update(self, part: str, text: str) -> None:
        with self._lock:
            _, since = self._parts.get(part, ("", time.monotonic()))
            self._parts[part] = (text, since)
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    get_renderable=self._render,
                    refresh_per_second=4,
                    transient=True,
                )
                self._live.start()

    @override
    def done(self, part: str, text: str) -> None:
        with self._lock:
            self._parts.pop(part, None)
            self._console.print(Text.assemble(("✓ ", "green"), (f"{part}: ", "bold"), text))
            if not self._parts:
                self._stop()

    @override
    def line(self, text: str) -> None:
        self._console.print(Text(text))

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._parts.clear()
            self._stop()

    def _stop(self) -> None:
        # Others write to the terminal too: while nothing is at work it is theirs.
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 1))
        now = time.monotonic()
        for part, (text, since) in tuple(self._parts.items()):
            seconds = Text(f"{now - since:.0f} s", "dim")
            table.add_row(self._spinner, Text(part, "bold"), Text(text), bar(text), seconds)
        return table


def bar(text: str) -> ProgressBar | Text:
    """The share that a text tells, as a bar; nothing for a text without one."""
    share = share_in(text)
    return Text() if share is None else ProgressBar(total=1, completed=share, width=BAR_WIDTH)
