"""Keeps every instance of the service running: the shell around the policy of
:mod:`services.supervisor`.

One task an instance. Its death leads to a new incarnation of just that instance; the set of live
workers is published after every change. Knows no Ray: whoever runs the processes is an
:class:`InstanceHost`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.errors import HostLostError, StartError
from services.resources import InstancePlan
from services.supervisor import Phase, Supervision
from transfer.identity import Incarnation
from worker.config import WorkerAddress

logger = logging.getLogger(__name__)

Report = Callable[[str, str], None]
"""(instance name, line) about a start, for the person who watches."""


class Watcher(Protocol):
    """The person who watches; a :class:`services.terminal.Terminal` is one."""

    def update(self, part: str, text: str) -> None:
        """``part`` is at work and has come to ``text``."""

    def done(self, part: str, text: str) -> None:
        """``part`` has finished, with ``text``."""


class RunningInstance(Protocol):
    """One incarnation that listens."""

    @property
    def address(self) -> WorkerAddress:
        """Where it listens."""

    def peer_dead(self, incarnation: Incarnation) -> None:
        """Tell it that the process of another instance is gone: nothing of that can touch its pages
        any more.
        """

    async def ended(self) -> str:
        """Wait until the incarnation has ended or must be ended, and say why."""

    async def stop(self) -> None:
        """End it, in order where possible, by force within 5 s. Idempotent."""


class InstanceHost(Protocol):
    """Runs processes of instances somewhere."""

    async def start(
        self, plan: InstancePlan, incarnation: Incarnation, report: Report
    ) -> RunningInstance:
        """Start an incarnation and wait until it listens. Raises StartError, and
        HostLostError where none will ever start again; nothing is left running then."""


class InstanceKeeper:
    """All instances of one service."""

    def __init__(
        self,
        host: InstanceHost,
        plans: Sequence[InstancePlan],
        publish: Callable[[tuple[WorkerAddress, ...]], None],
        watcher: Watcher,
        *,
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._host = host
        self._plans = tuple(plans)
        self._publish = publish
        self._watcher = watcher
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._live: dict[str, WorkerAddress] = {}
        self._running: dict[str, RunningInstance] = {}
        self._all_up = asyncio.Event()

    @property
    def live(self) -> tuple[WorkerAddress, ...]:
        """Workers that listen, in the order of the plans."""
        return tuple(self._live[plan.name] for plan in self._plans if plan.name in self._live)

    async def all_up(self) -> None:
        """Wait until every instance is up at the same time."""
        await self._all_up.wait()

    async def run(self) -> None:
        """Keep all instances until cancelled; on the way out every one of them is stopped.

        Raises StartError when an instance that has never been up cannot start, or none can any
        more.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._plans:
                    group.create_task(self._keep(plan), name=f"keep {plan.name}")
        except BaseExceptionGroup as errors:
            # Not except*: Python 3.11.2 wraps what is raised there into a group again.
            failed, others = errors.split(StartError)
            if failed is None or others is not None:
                raise
            raise _first(failed) from errors

    async def _keep(self, plan: InstancePlan) -> None:
        state = Supervision()
        while True:
            await self._sleep(max(0, state.start_at_ms - self._clock_ms()) / 1_000)
            state = state.started()
            try:
                running = await self._host.start(
                    plan, Incarnation.mint(plan.name), self._watcher.update
                )
            except HostLostError:
                raise
            except StartError as error:
                state = state.died(self._clock_ms())
                if state.phase is Phase.GIVEN_UP:
                    raise
                self._tell_restart(plan, f"did not start: {error}", state)
                continue
            try:
                state = state.came_up(self._clock_ms())
                self._set(plan.name, running.address)
                self._running[plan.name] = running
                self._watcher.done(plan.name, _place(running.address))
                reason = await running.ended()
                # First of all nothing more is sent to it; then what is left of it is removed.
                self._set(plan.name, None)
            finally:
                self._running.pop(plan.name, None)
                await running.stop()
            for other in self._running.values():
                other.peer_dead(running.address.incarnation)
            state = state.died(self._clock_ms())
            self._tell_restart(plan, f"{running.address.incarnation} ended: {reason}", state)

    def _set(self, name: str, address: WorkerAddress | None) -> None:
        if address is None:
            self._live.pop(name, None)
            self._all_up.clear()
        else:
            self._live[name] = address
            if len(self._live) == len(self._plans):
                self._all_up.set()
        self._publish(self.live)

    def _tell_restart(self, plan: InstancePlan, what: str, state: Supervision) -> None:
        wait_ms = max(0, state.start_at_ms - self._clock_ms())
        logger.warning("%s %s; new incarnation in %d ms", plan.name, what, wait_ms)
        self._watcher.update(plan.name, f"restarting ({what})")


def _place(address: WorkerAddress) -> str:
    return f"up on {address.host}:{address.port} (pid {address.pid})"


def _first(errors: ExceptionGroup[StartError]) -> StartError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
