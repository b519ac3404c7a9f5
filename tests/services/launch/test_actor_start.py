"""Starts of an instance's actors that fail or are given up, over actors that answer as told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

import services.launch
from services.errors import HostLostError, StartError
from services.launch import RayHost, RaySettings
from services.resources import InstancePlan
from transfer.identity import Incarnation
from worker.config import WorkerConfig

PLAN = InstancePlan(
    name="context-0",
    role="context",
    device="cpu",
    gpu_fraction=0.0,
    torch_threads=1,
    kv_cache_bytes=1 << 20,
    tensor_parallel_size=2,
)


def pending() -> Future[Any]:
    return Future()


def answer(value: object) -> Callable[[], Future[Any]]:
    def make() -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    return make


def failure() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(RayError("no such model"))
    return future


class FakeMethod:
    def __init__(self, future: Callable[[], Future[Any]]) -> None:
        self.future = future

    def remote(self) -> FakeMethod:
        return self


class FakeActor:
    def __init__(self, **answers: Callable[[], Future[Any]]) -> None:
        self.start = FakeMethod(answers["start"])
        self.progress = FakeMethod(answers["progress"])


class FakeActorClass:
    """Stands for RankActor: gives out the actors that it was made with, in order of ranks."""

    def __init__(self, *actors: FakeActor) -> None:
        self._actors = list(actors)

    def options(self, **_: object) -> FakeActorClass:
        return self

    def remote(self, _config: str) -> FakeActor:
        return self._actors.pop(0)


def config(plan: InstancePlan, incarnation: Incarnation, host: str) -> WorkerConfig:
    return WorkerConfig(
        incarnation=incarnation,
        role=plan.role,
        model_path="/no/model",
        model_name="no-model",
        host=host,
        cluster_token="a token of a test",
        tensor_parallel_size=plan.tensor_parallel_size,
    )


class Starts:
    """Starts of one instance, and what became of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *actors: FakeActor) -> None:
        self.killed: list[object] = []
        self.lines: list[str] = []
        self._actors = actors
        monkeypatch.setattr(services.launch, "RankActor", FakeActorClass(*actors))
        self.alive = True
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": self.alive}])
        monkeypatch.setattr(ray, "kill", lambda actor, **_: self.killed.append(actor))

    async def start(self, startup_timeout_s: float) -> None:
        settings = RaySettings(
            address=None,
            cluster_name="test",
            startup_timeout_s=startup_timeout_s,
            worker_environment={},
        )
        await RayHost(settings, config, None).start(
            PLAN, Incarnation.mint(PLAN.name), lambda _name, line: self.lines.append(line)
        )

    def nothing_runs(self) -> bool:
        return self.killed == list(self._actors)


def complaints() -> list[Mapping[str, Any]]:
    """What asyncio is going to log about this loop, filled as it goes."""
    found: list[Mapping[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def refusal(starts: Starts, startup_timeout_s: float) -> str:
    """Why the start failed. The error itself is let go, as it would keep futures alive."""
    try:
        await asyncio.wait_for(starts.start(startup_timeout_s), 5.0)
    except StartError as error:
        return str(error)
    return "it did not"


async def test_a_start_that_is_given_up_leaves_nothing_to_complain_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = complaints()
    # As when another instance of the service cannot start.
    starts = Starts(
        monkeypatch,
        FakeActor(start=pending, progress=answer(["loading"])),
        FakeActor(start=pending, progress=pending),
    )
    task = asyncio.ensure_future(starts.start(60.0))
    await asyncio.sleep(0.01)
    assert starts.lines[:2] == ["starting the process", "loading"]
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert (found, starts.nothing_runs()) == ([], True)


@pytest.mark.parametrize("progress", [answer([]), pending])
async def test_no_start_lasts_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, progress: Callable[[], Future[Any]]
) -> None:
    found = complaints()
    # Without progress: Ray has no room for it, or it was stopped; calls neither fail nor return.
    starts = Starts(
        monkeypatch,
        FakeActor(start=pending, progress=progress),
        FakeActor(start=pending, progress=pending),
    )
    assert (await refusal(starts, 0.01)).startswith("context-0 was not up after")
    gc.collect()
    assert (found, starts.nothing_runs()) == ([], True)


async def test_a_rank_that_fails_is_heard_while_the_leader_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = complaints()
    starts = Starts(
        monkeypatch,
        FakeActor(start=pending, progress=pending),
        FakeActor(start=failure, progress=pending),
    )
    assert await refusal(starts, 60.0) == "context-0 cannot start: RayError: no such model"
    gc.collect()
    assert (found, starts.nothing_runs()) == ([], True)


async def test_nothing_is_started_where_ray_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch)
    starts.alive = False
    with pytest.raises(HostLostError, match="the private Ray of this service has died"):
        await asyncio.wait_for(starts.start(60.0), 5.0)
