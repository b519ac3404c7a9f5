"""One thread that owns every UCX object of the process.

It sleeps in epoll on UCX's event descriptor and on its own wake-up descriptor, and goes round only
when one of them says so: idle, or with receives pending, it uses no CPU. Commands come through a
deque. A request and its buffer are held here from posting until UCX itself has completed the
request, cancelled or not: ucxx would otherwise forget a request whose buffer UCX goes on writing.

UCX objects are created, used and destroyed in this thread only; the loop's side sees plain Python
objects. The garbage collector runs in any thread: so each of them is held here until it is closed,
whoever has forgotten it. Every peer has a UCX worker of its own, a :class:`Unit`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from transfer.descriptors import PEER_DESCRIPTORS, check_left
from transfer.loops import call_in
from transfer.transport import TransportError
from transfer.ucx.library import STATUS_CANCELED, STATUS_OK, Library

POLL_S: Final = 1.0
"""Upper bound of one sleep, so that a lost event costs a second and not a transfer."""
LOOKING_POLL_S: Final = 0.01
"""The same while a worker is to be destroyed or a look is not over: there is no event for either.
"""
BUSY_ROUNDS: Final = 2
BUSY_S: Final = 100e-6
"""UCX gives no event when a full queue of a shared memory lane drains. After so many rounds the
thread waits this long between looks instead of taking the core from the peer that drains it.
"""
DRAIN_S: Final = 2.0
"""How long a stopping driver waits for requests that were cancelled."""
DRAIN_STEP_S: Final = 0.001
KNOCK_S: Final = 0.2
"""How long a listener that is of no use any more still hears whoever was about to dial it."""
GIVE_UP_S: Final = 0.2
GIVE_UP_ROUNDS: Final = 20
"""How long, and in how many rounds, what a closed endpoint has under way may end by itself."""

Finished = Callable[[int, str], None]
"""Called in the event loop with UCX's status (0 is success) and its text."""


class Closable(Protocol):
    """An endpoint of a unit."""

    def close_raw(self) -> None:
        """Close the UCX endpoint. Idempotent."""


class Unit:
    """One UCX worker, which serves one peer and ends with it. Belongs to the driver thread.

    A shared memory lane delivers into one queue of the receiving worker, whoever sends. A sender
    that is killed while it fills a place of that queue leaves the place reserved for ever, and no
    later message of anybody gets past it. So no two peers share a worker.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.listener: Any = None
        """Kept as long as the worker: UCX's own listener lives on with the endpoints it made."""
        self.live = 0
        """Requests that have not completed."""
        self.open: list[Closable] = []
        """Endpoints that were not closed."""
        self.closed: list[Any] = []
        """ucxx endpoints that were closed. They and what they had under way outlive every progress
        of the worker.
        """
        self.copies = False
        """Whether its lanes move bytes only while the worker is progressed."""
        self.retired = False
        self.keep_s = 0.0
        """Not destroyed before, where it is retired."""
        self.rounds_left = GIVE_UP_ROUNDS
        self.give_up_s = 0.0


@dataclass(frozen=True)
class _Live:
    unit: Unit
    request: Any
    buffer: Any
    finished: Finished
    dropped: Callable[[], None]


class Driver:
    """The thread, its queue of commands and the requests that have not completed."""

    def __init__(
        self, library: Library, failed: Callable[[str], None], cuda_device: int | None
    ) -> None:
        """``failed`` is called in the event loop if the thread dies of an error."""
        self.library = library
        self._cuda_device = cuda_device
        self._failed = failed
        self._commands: deque[Callable[[], None]] = deque()
        self._live: list[_Live] = []
        self._deliveries: list[Callable[[], None]] = []
        self._looks: list[Callable[[], bool]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._stopping = False
        self._teardown: Callable[[], None] = _nothing
        self._context: Any = None
        self._units: list[Unit] = []
        self._given_up: list[object] = []
        """Workers, with all that is theirs, that must be neither progressed nor destroyed."""
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ucx-driver", daemon=True)

    async def start(self) -> str:
        """Start the thread, open UCX's context; return its description."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[str] = self._loop.create_future()
        self._commands.append(lambda: self.answer(opened, self._context.info))
        self._failed = _first(self._failed, opened)
        self._thread.start()
        # A daemon thread inside C++ frames must not meet the interpreter's end.
        atexit.register(self._stop_at_exit)
        return await opened

    def submit(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the thread, in order of submission. Thread safe."""
        self._commands.append(command)
        # The thread clears the mark before it looks for commands, so none is overlooked.
        if not self._woken:
            self._wake_up()

    async def stop(self, teardown: Callable[[], None]) -> None:
        """Run ``teardown`` in the thread, let cancelled requests end, destroy workers and context,
        end the thread.
        """
        atexit.unregister(self._stop_at_exit)
        if not self._thread.is_alive():
            return
        self._teardown = teardown
        self._stopping = True
        self._wake_up()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._thread.join)
        self._poller.close()
        os.close(self._wake)

    def _stop_at_exit(self) -> None:
        self._stopping = True
        self._wake_up()
        self._thread.join(DRAIN_S + POLL_S)

    def cpu_seconds(self) -> float:
        """CPU time that the thread has used so far."""
        ident = self._thread.ident
        if ident is None or not self._thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    # What follows runs in the thread.

    def open_unit(self) -> Unit:
        """A new UCX worker; takes about 20 ms. Raises TransportError without room for one."""
        check_left(PEER_DESCRIPTORS)
        unit = Unit(self.library.api.UCXWorker(self._context))
        unit.worker.init_blocking_progress_mode()
        self._poller.register(unit.worker.epoll_file_descriptor, select.EPOLLIN)
        self._units.append(unit)
        return unit

    def retire(self, unit: Unit) -> None:
        """Close its endpoints, and destroy the worker as soon as none of its requests is under way.
        Idempotent.
        """
        if not unit.retired:
            unit.retired = True
            unit.give_up_s = time.monotonic() + GIVE_UP_S
            for endpoint in tuple(unit.open):
                endpoint.close_raw()

    def retire_listening(self, unit: Unit) -> None:
        """:meth:`retire` one that nobody has dialled as it seems. A connection that UCX has
        accepted and not yet read from must not outlive the listener: when its first bytes come, UCX
        looks into what was freed. So a dialler that is on its way is heard first.
        """
        unit.keep_s = time.monotonic() + KNOCK_S
        self.retire(unit)

    def close(self, unit: Unit, endpoint: Any) -> None:
        """Close a ucxx endpoint of this unit without waiting for the peer."""
        # close() flushes to a peer that may be stopped, and crashes on a closed endpoint.
        endpoint.close_blocking()
        unit.closed.append(endpoint)

    def has_leftover(self, unit: Unit) -> bool:
        """Whether a message has come, or begun to, that no receive was posted for."""
        return bool(unit.worker.tag_probe(self.library.tag(0), self.library.any_tag).matched)

    def watch(
        self,
        unit: Unit,
        request: Any,
        buffer: Any,
        finished: Finished,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Hold ``request`` and ``buffer`` until UCX has completed the request, then report.

        ``dropped`` is called in this thread, to let go of the request elsewhere.
        """
        unit.live += 1
        self._live.append(_Live(unit, request, buffer, finished, dropped or _nothing))

    def look(self, look: Callable[[], bool]) -> None:
        """Call ``look`` after every progress, and soon without any, until it says it is over."""
        self._looks.append(look)

    def deliver(self, callback: Callable[[], None]) -> None:
        """Have the event loop call ``callback``; batched per round, order kept."""
        self._deliveries.append(callback)

    def answer(self, future: asyncio.Future[Any], value: Any) -> None:
        """Deliver the result of a future of the loop, unless it has one."""
        self.deliver(lambda: None if future.done() else future.set_result(value))

    def _wake_up(self) -> None:
        self._woken = True
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._open()
            self._go_round()
            self._close()
        except BaseException as error:
            reason = f"UCX driver thread died: {type(error).__name__}: {error}"
            self._deliveries.append(lambda: self._failed(reason))
            self._flush()
            raise

    def _open(self) -> None:
        if self._cuda_device is not None:
            self.library.use_cuda_device(self._cuda_device)
        api = self.library.api
        features = (api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP)
        self._context = api.UCXContext({}, features)

    def _go_round(self) -> None:
        busy_rounds = 0
        while not self._stopping:
            self._round()
            if self._commands:
                continue
            if not self._arm():
                busy_rounds += 1
                if busy_rounds > BUSY_ROUNDS:
                    time.sleep(BUSY_S)
                continue
            busy_rounds = 0
            for descriptor, _ in self._poller.poll(LOOKING_POLL_S if self._looking() else POLL_S):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)

    def _looking(self) -> bool:
        waiting = (unit.retired and (unit.copies or unit.keep_s) for unit in self._units)
        return bool(self._looks) or any(waiting)

    def _arm(self) -> bool:
        """Whether every worker will signal its next event; one that has work now does not."""
        return all(unit.worker.arm() for unit in self._units)

    def _round(self) -> None:
        self._woken = False
        while self._commands:
            self._commands.popleft()()
        for unit in self._units:
            # Not progress_once: only this one carries out cancellations of endpoints in error.
            unit.worker.progress()
        self._looks = [look for look in self._looks if not look()]
        self._collect()
        self._reap()
        self._give_up()
        self._flush()

    def _reap(self) -> None:
        now_s = time.monotonic()
        for unit in [unit for unit in self._units if unit.retired and not unit.live]:
            if now_s < unit.keep_s:
                continue
            self._take_leftovers(unit)
            if unit.live:
                continue
            self._units.remove(unit)
            self._poller.unregister(unit.worker.epoll_file_descriptor)
            for endpoint in unit.closed:
                # Its requests hold it, and with it the worker, until it forgets them.
                self.library.canceling(endpoint)
            unit.closed.clear()
            unit.listener = None
            unit.worker = None

    def _give_up(self) -> None:
        """End what UCX never ends: a receive of which a part has come waits for the rest, whatever
        became of its endpoint, and would write it. Nothing is written for a worker that is not
        progressed any more, unless a lane lets the peer reach pages by itself.
        """
        for unit in [unit for unit in self._units if unit.retired and unit.copies]:
            unit.rounds_left -= 1
            if unit.rounds_left > 0 or time.monotonic() < unit.give_up_s:
                continue
            self._units.remove(unit)
            self._poller.unregister(unit.worker.epoll_file_descriptor)
            left = [live for live in self._live if live.unit is unit]
            self._live = [live for live in self._live if live.unit is not unit]
            # Where ucxx destroys the worker it would wait for them.
            self._given_up.append((unit, left))
            for live in left:
                self._end(live, STATUS_CANCELED, "given up after its endpoint was closed")

    def _take_leftovers(self, unit: Unit) -> None:
        """Receive what nobody waits for, in place of ucxx: while it destroys a worker it waits
        for all of it, and for the rest of a message whose sender was killed it waits for ever.
        Here such a receive is a request like any other, and is given up as such.
        """
        while self.has_leftover(unit):
            array = self.library.array(bytearray(1))
            request = unit.worker.tag_recv(array, self.library.tag(0), self.library.any_tag)
            self.watch(unit, request, array, _ignore)

    def _collect(self) -> None:
        pending: list[_Live] = []
        for live in self._live:
            if live.request.completed:
                self._report(live)
            else:
                pending.append(live)
        self._live = pending

    def _report(self, live: _Live) -> None:
        status = int(live.request.status)
        text = ""
        if status != STATUS_OK:
            try:
                live.request.check_error()
            except self.library.error as error:
                text = str(error)
        self._end(live, status, text)

    def _end(self, live: _Live, status: int, text: str) -> None:
        live.unit.live -= 1
        live.dropped()
        # The ucxx request must not leave this thread: its destructor may destroy an endpoint.
        finished = live.finished
        self.deliver(lambda: finished(status, text))

    def _flush(self) -> None:
        if not self._deliveries:
            return
        batch, self._deliveries = self._deliveries, []
        loop = self._loop
        if loop is None:
            return
        call_in(loop, _schedule, loop, batch)

    def _close(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._teardown()
        self._teardown = _nothing
        for unit in self._units:
            self.retire(unit)
            unit.keep_s = 0.0
        end = time.monotonic() + DRAIN_S
        self._round()
        while self._units and time.monotonic() < end:
            time.sleep(DRAIN_STEP_S)
            self._round()
        # Destroying a worker ends whatever is left; until then its buffers are held.
        left, self._live = self._live, []
        self._units.clear()
        for live in left:
            self._report(live)
            live.unit.listener = None
            live.unit.worker = None
        self._context = None
        self._flush()


def _nothing() -> None:
    """Nothing to tear down."""


def _ignore(status: int, text: str) -> None:
    """Nobody waits for this request."""


def _schedule(loop: asyncio.AbstractEventLoop, batch: list[Callable[[], None]]) -> None:
    for callback in batch:
        loop.call_soon(callback)


def _first(failed: Callable[[str], None], opened: asyncio.Future[str]) -> Callable[[str], None]:
    """Failures before the thread is up are the starter's; later ones go to ``failed`` too."""

    def report(reason: str) -> None:
        if not opened.done():
            opened.set_exception(TransportError(reason))
        failed(reason)

    return report
