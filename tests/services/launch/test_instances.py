"""The keeper of instances over a fake host: restarts, membership, failures, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from typing_extensions import override

from services.errors import HostLostError, StartError
from services.instances import InstanceHost, InstanceKeeper, Report, RunningInstance
from services.resources import InstancePlan
from transfer.identity import Incarnation
from worker.config import WorkerAddress
from worker.messages import WorkerRole


def plan(name: str, role: WorkerRole) -> InstancePlan:
    return InstancePlan(
        name=name, role=role, device="cpu", gpu_fraction=0, torch_threads=1, kv_cache_bytes=1 << 20
    )


PLANS = (plan("context-0", "context"), plan("generation-0", "generation"))


class FakeInstance(RunningInstance):
    def __init__(self, incarnation: Incarnation, role: WorkerRole, log: list[str]) -> None:
        self._address = WorkerAddress(
            incarnation=incarnation, role=role, host="127.0.0.1", port=1, pid=1
        )
        self._log = log
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stops = 0
        self.dead_peers: list[Incarnation] = []

    @property
    @override
    def address(self) -> WorkerAddress:
        return self._address

    @override
    def peer_dead(self, incarnation: Incarnation) -> None:
        assert f"stop {incarnation.instance}" in self._log
        self.dead_peers.append(incarnation)

    @override
    async def ended(self) -> str:
        return await asyncio.shield(self.end)

    @override
    async def stop(self) -> None:
        self.stops += 1
        self._log.append(f"stop {self._address.incarnation.instance}")


class FakeHost(InstanceHost):
    """Every start succeeds unless an error is queued for the instance."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.errors: dict[str, list[str]] = {}
        self.running: dict[str, list[FakeInstance]] = {}
        self.blocked: set[str] = set()
        self.is_lost = False

    @override
    async def start(
        self, plan: InstancePlan, incarnation: Incarnation, report: Report
    ) -> RunningInstance:
        report(plan.name, "loading")
        if self.is_lost:
            raise HostLostError("Ray has died")
        if self.errors.get(plan.name):
            raise StartError(self.errors[plan.name].pop(0))
        if plan.name in self.blocked:
            await asyncio.Event().wait()
        instance = FakeInstance(incarnation, plan.role, self.log)
        self.running.setdefault(plan.name, []).append(instance)
        return instance


class Watch:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, part: str, text: str) -> None:
        self.lines.append(f"{part}: {text}")

    def done(self, part: str, text: str) -> None:
        self.lines.append(f"{part}: {text}")


class Rig:
    """A keeper whose clock moves only by its own sleeps."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.host = FakeHost(self.log)
        self.watch = Watch()
        self.published: list[tuple[str, ...]] = []
        self.changed = asyncio.Event()
        self.now_ms = 0
        self.sleeps_s: list[float] = []
        self.keeper = InstanceKeeper(
            self.host,
            PLANS,
            self.publish,
            self.watch,
            clock_ms=lambda: self.now_ms,
            sleep=self.sleep,
        )

    def publish(self, workers: tuple[WorkerAddress, ...]) -> None:
        names = tuple(worker.incarnation.instance for worker in workers)
        self.published.append(names)
        self.log.append(f"publish {' '.join(names)}")
        self.changed.set()

    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.sleeps_s.append(seconds)
            self.now_ms += round(seconds * 1_000)
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def with_rig(work: Callable[[Rig], Awaitable[None]]) -> Rig:
    rig = Rig()
    task = asyncio.ensure_future(rig.keeper.run())
    try:
        await work(rig)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return rig


async def test_all_instances_are_published_and_stopped_in_the_end() -> None:
    async def work(rig: Rig) -> None:
        await rig.keeper.all_up()
        assert rig.published[-1] == ("context-0", "generation-0")

    rig = await with_rig(work)
    assert [i.stops for started in rig.host.running.values() for i in started] == [1, 1]
    assert any("loading" in line for line in rig.watch.lines)


async def test_a_death_restarts_just_that_instance_as_a_new_incarnation() -> None:
    async def work(rig: Rig) -> None:
        await rig.keeper.all_up()
        first = rig.host.running["context-0"][0]
        rig.log.clear()
        first.end.set_result("the process died")
        await rig.until(lambda: len(rig.host.running["context-0"]) == 2)
        await rig.keeper.all_up()
        second = rig.host.running["context-0"][1]
        assert second.address.incarnation.instance == "context-0"
        assert second.address.incarnation.nonce != first.address.incarnation.nonce
        assert len(rig.host.running["generation-0"]) == 1
        survivor = rig.host.running["generation-0"][0]
        assert survivor.stops == 0
        assert survivor.dead_peers == [first.address.incarnation]
        assert second.dead_peers == []
        # Nothing more is sent to the dead one before anything else happens.
        assert rig.log == [
            "publish generation-0",
            "stop context-0",
            "publish context-0 generation-0",
        ]
        assert rig.sleeps_s == [0.2]

    await with_rig(work)


async def test_an_instance_that_keeps_dying_is_started_more_and_more_slowly() -> None:
    async def work(rig: Rig) -> None:
        for number in range(1, 5):
            await rig.until(lambda n=number: len(rig.host.running.get("context-0", ())) == n)  # type: ignore[misc]
            await rig.keeper.all_up()
            rig.host.running["context-0"][-1].end.set_result("again")
            rig.changed.clear()
        await rig.until(lambda: len(rig.host.running["context-0"]) == 5)
        assert rig.sleeps_s == [0.2, 0.4, 0.8, 1.6]

    await with_rig(work)


async def test_a_restart_that_fails_is_tried_again() -> None:
    async def work(rig: Rig) -> None:
        await rig.keeper.all_up()
        rig.host.errors["context-0"] = ["no memory just now"]
        rig.host.running["context-0"][0].end.set_result("the process died")
        await rig.until(lambda: len(rig.host.running["context-0"]) == 2)
        assert rig.sleeps_s == [0.2, 0.4]
        assert any("no memory just now" in line for line in rig.watch.lines)

    await with_rig(work)


async def test_a_first_start_that_fails_ends_everything_with_its_reason() -> None:
    rig = Rig()
    rig.host.errors["generation-0"] = ["generation-0 cannot start: wrong model"]
    with pytest.raises(StartError, match="wrong model"):
        await rig.keeper.run()
    assert [instance.stops for instance in rig.host.running.get("context-0", [])] in ([1], [])


async def test_a_host_that_is_lost_ends_everything() -> None:
    rig = Rig()
    task = asyncio.ensure_future(rig.keeper.run())
    await rig.keeper.all_up()
    rig.host.is_lost = True
    rig.host.running["context-0"][0].end.set_result("the process died")
    with pytest.raises(StartError, match="Ray has died"):
        await asyncio.wait_for(task, 5.0)
    assert rig.host.running["generation-0"][0].stops == 1


async def test_stopping_while_an_instance_starts_leaves_nothing() -> None:
    rig = Rig()
    rig.host.blocked.add("generation-0")
    task = asyncio.ensure_future(rig.keeper.run())
    await rig.until(lambda: rig.published[-1:] == [("context-0",)])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.host.running["context-0"][0].stops == 1
