"""Passes in a thread: one after the other, told in the loop, over with the runner.

Budget: 1 s.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from transfer.passes import PassThread


async def test_passes_run_in_order_in_one_thread_and_are_told_in_the_loop() -> None:
    passes, loop = PassThread(), asyncio.get_running_loop()
    ran: list[tuple[int, int]] = []
    told: list[tuple[int, str, int]] = []
    last: asyncio.Future[None] = loop.create_future()

    def work(number: int) -> None:
        ran.append((number, threading.get_ident()))
        if number == 1:
            raise RuntimeError("the device is gone")

    def over(number: int, failure: str) -> None:
        told.append((number, failure, threading.get_ident()))
        if number == 3:
            last.set_result(None)

    for number in range(4):
        passes.start(lambda n=number: work(n), lambda why, n=number: over(n, why))  # type: ignore[misc]
    assert told == []
    await asyncio.wait_for(last, 30)
    assert [number for number, _ in ran] == [0, 1, 2, 3]
    assert len({thread for _, thread in ran}) == 1
    assert ran[0][1] != threading.get_ident()
    failures = ["", "RuntimeError: the device is gone", "", ""]
    assert told == [(n, why, threading.get_ident()) for n, why in enumerate(failures)]


async def test_the_thread_ends_with_the_runner_and_holds_no_pass() -> None:
    class Pages:
        """What a pass works on."""

    passes, pages = PassThread(), Pages()
    gone = weakref.ref(pages)
    threads: list[threading.Thread] = []
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def work(_pages: Pages = pages) -> None:
        threads.append(threading.current_thread())

    passes.start(work, over.set_result)
    assert await asyncio.wait_for(over, 30) == ""
    # A later pass has begun, so that nothing of the first one is on the thread's stack.
    over = asyncio.get_running_loop().create_future()
    passes.start(lambda: None, over.set_result)
    await asyncio.wait_for(over, 30)
    del work, pages
    gc.collect()
    assert gone() is None
    del passes
    await asyncio.to_thread(threads[0].join, 30)
    assert not threads[0].is_alive()


def test_a_loop_that_is_closed_is_told_nothing_and_the_next_pass_runs() -> None:
    passes, let_go = PassThread(), threading.Event()

    async def begin() -> None:
        passes.start(lambda: assert_set(let_go), lambda _: pytest.fail("told after the end"))

    async def again() -> str:
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        passes.start(lambda: None, over.set_result)
        return await asyncio.wait_for(over, 30)

    asyncio.run(begin())
    let_go.set()
    assert asyncio.run(again()) == ""


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)
