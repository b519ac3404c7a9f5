"""Calls into a loop from another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from transfer.loops import call_in

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_step_is_called_in_the_loops_thread(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = make_loop()
    seen: list[tuple[int, str]] = []

    def step(word: str) -> None:
        seen.append((threading.get_ident(), word))
        loop.stop()

    caller = threading.Thread(target=lambda: call_in(loop, step, "there"))
    caller.start()
    loop.run_forever()
    caller.join()
    assert seen == [(threading.get_ident(), "there")]
    loop.close()


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_closed_loop_has_nobody_to_tell(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = make_loop()
    loop.close()
    seen: list[str] = []
    assert call_in(loop, seen.append, "lost") is False
    assert not seen


def test_another_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(loop, "call_soon_threadsafe", broken)
    with pytest.raises(RuntimeError, match="broken"):
        call_in(loop, print)
    loop.close()
