"""Instances as Ray actors: the one file of the services that knows Ray.

Ray places, starts and kills processes; no token and no page passes through it. A private Ray
listens on the loopback interface only and ends with the launcher, however that ends: its processes
are tied to this one by the kernel, and actors are not detached. Call :meth:`RayHost.open` from the
main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from services.errors import HostLostError, StartError
from services.instances import InstanceHost, Report, RunningInstance
from services.resources import InstancePlan
from services.worker_environment import worker_variables
from transfer.identity import Incarnation
from worker.actor import RankActor
from worker.config import WorkerAddress, WorkerConfig

logger = logging.getLogger(__name__)

NAMESPACE: Final = "pageferry"
OBJECT_STORE_BYTES: Final = 80 << 20
"""The least Ray accepts: nothing of ours goes through it."""
PROGRESS_POLL_S: Final = 0.25
STOP_GRACE_S: Final = 4.0
"""For an orderly end of an instance; after it the process is killed."""
KILL_GRACE_S: Final = 1.0
REAPER_TIMEOUT_S: Final = 15.0

MakeConfig = Callable[[InstancePlan, Incarnation, str], WorkerConfig]
"""(plan, incarnation, host to listen on) -> configuration of the worker."""


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """How to reach or start Ray, and what workers find in their environment."""

    address: str | None
    """None: a private Ray on this machine."""
    cluster_name: str
    startup_timeout_s: float
    worker_environment: Mapping[str, str]


class RayHost(InstanceHost):
    """Starts instances as actors of one Ray cluster."""

    def __init__(
        self, settings: RaySettings, make_config: MakeConfig, session: _Session | None
    ) -> None:
        self._settings = settings
        self._make_config = make_config
        self._session = session

    @classmethod
    def open(cls, settings: RaySettings, make_config: MakeConfig) -> RayHost:
        """Start or join Ray. Blocks for seconds. Raises StartError."""
        session = None
        arguments: dict[str, Any] = {
            "namespace": NAMESPACE,
            "logging_level": "error",
            "log_to_driver": True,
        }
        if settings.address is None:
            session = _Session()
            arguments |= {
                "address": "local",
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": session.folder,
            }
        else:
            arguments |= {"address": settings.address}
        try:
            with _neutral_directory(None if session is None else session.folder):
                ray.init(**arguments)
        except BaseException as error:
            ray.shutdown()
            if session is not None:
                session.close()
            # Ray raises the bare Exception when its own processes are not up in time.
            if not isinstance(error, Exception):
                raise
            if settings.address is None:
                raise StartError(f"Ray cannot be started on this machine: {error}") from error
            raise StartError(
                f"the Ray cluster {settings.address} cannot be joined: {error}; is it up, and are "
                "RAY_AUTH_MODE and the token here those of the cluster?"
            ) from error
        return cls(settings, make_config, session)

    def close(self) -> None:
        """Leave Ray, and end it if it is a private one: nothing of it stays, however it went."""
        try:
            ray.shutdown()
        finally:
            if self._session is not None:
                self._session.close()

    @override
    async def start(
        self, plan: InstancePlan, incarnation: Incarnation, report: Report
    ) -> RunningInstance:
        if self._settings.address is None and not any(node["Alive"] for node in ray.nodes()):
            # Nobody starts it again, and without it an actor is waited for without end.
            raise HostLostError(
                "the private Ray of this service has died (its raylet was killed or ended); its "
                "last lines above may say why; start the service again"
            )
        node_id, host = self._node_for(plan)
        leader = self._make_config(plan, incarnation, host)
        actors = [
            self._actor(plan, node_id, leader.model_copy(update={"rank": rank}))
            for rank in range(leader.tensor_parallel_size)
        ]
        try:
            addresses = await self._start(actors, plan, report)
        except BaseException:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            raise
        return RayInstance(actors, addresses, is_local=self._settings.address is None)

    def _actor(self, plan: InstancePlan, node_id: str | None, config: WorkerConfig) -> Any:
        """The process of one rank; all of an instance are on one node."""
        rank = f"/{config.rank}" if config.rank else ""
        return (
            cast("Any", RankActor)
            .options(
                name=f"{self._settings.cluster_name}/{config.incarnation}{rank}",
                num_gpus=plan.gpu_fraction,
                runtime_env={"env_vars": worker_variables(plan, self._settings.worker_environment)},
                scheduling_strategy=(
                    "DEFAULT"
                    if node_id is None
                    else NodeAffinitySchedulingStrategy(node_id, soft=False)
                ),
            )
            .remote(config.model_dump_json())
        )

    async def _start(
        self, actors: Sequence[Any], plan: InstancePlan, report: Report
    ) -> tuple[WorkerAddress, ...]:
        """Start all ranks at once, as they wait for each other. In order of ranks."""
        limit_s = self._settings.startup_timeout_s
        report(plan.name, "starting the process")
        # A task of its own: a process that is stopped, or for which Ray has no room, never answers.
        telling = asyncio.ensure_future(
            _tell_progress(actors[0], lambda line: report(plan.name, line))
        )
        starts = [asyncio.ensure_future(_result(actor.start.remote())) for actor in actors]
        try:
            async with asyncio.timeout(limit_s):
                started = await asyncio.gather(*starts)
            return tuple(WorkerAddress.model_validate_json(one) for one in started)
        except RayError as error:
            raise StartError(f"{plan.name} cannot start: {_reason(error)}") from error
        except TimeoutError as error:
            raise StartError(
                f"{plan.name} was not up after {limit_s:.0f} s; "
                "raise startup_timeout_ms, or look for what it waits for in its last line"
            ) from error
        finally:
            for one in (telling, *starts):
                one.cancel()
            await asyncio.wait({telling, *starts})

    def _node_for(self, plan: InstancePlan) -> tuple[str | None, str]:
        """Node and address for an instance: on a cluster, the nodes in turn."""
        if self._settings.address is None:
            return None, "127.0.0.1"
        resource = "GPU" if plan.gpu_fraction else "CPU"
        nodes = sorted(
            (node["NodeManagerAddress"], node["NodeID"])
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(resource, 0) > 0
        )
        if not nodes:
            raise StartError(f"{plan.name}: no live node of the Ray cluster has a {resource}")
        offset = 0 if plan.role == "context" else len(nodes) // 2
        host, node_id = nodes[(int(plan.name.rsplit("-", 1)[1]) + offset) % len(nodes)]
        return node_id, host


class _Session:
    """Folder of a private Ray, and the process that clears it when this one is killed."""

    def __init__(self) -> None:
        # Sockets lie in this folder, and their paths may not be longer than 107 characters.
        self.folder = tempfile.mkdtemp(prefix="pageferry-ray-", dir="/tmp")
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.reaper", self.folder],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            os.rmdir(self.folder)
            raise

    def close(self) -> None:
        """Whatever still runs there ends, and the folder goes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.communicate(timeout=REAPER_TIMEOUT_S)


class RayInstance(RunningInstance):
    """The actors of one instance, the leader first."""

    def __init__(
        self, actors: Sequence[Any], addresses: Sequence[WorkerAddress], *, is_local: bool
    ) -> None:
        self._actors = tuple(actors)
        self._addresses = tuple(addresses)
        self._is_local = is_local
        self._ended = False

    @property
    @override
    def address(self) -> WorkerAddress:
        return self._addresses[0]

    @override
    def peer_dead(self, incarnation: Incarnation) -> None:
        for actor in self._actors:
            actor.peer_dead.remote(incarnation.model_dump_json())

    @override
    async def ended(self) -> str:
        """With its first rank: what is left of it is of no use."""
        waits = [asyncio.ensure_future(_end_of(actor)) for actor in self._actors]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(sorted({one.result() for one in done}))
        finally:
            for one in waits:
                one.cancel()

    @override
    async def stop(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            stops = [_result(actor.stop.remote()) for actor in self._actors]
            await asyncio.wait_for(asyncio.gather(*stops), STOP_GRACE_S)
        except (RayError, TimeoutError):
            logger.debug("%s did not end in order", self.address.incarnation)
        finally:
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._is_local:
                await asyncio.gather(*(_make_sure(one.pid) for one in self._addresses))


async def _tell_progress(leader: Any, report: Callable[[str], None]) -> None:
    """Pass on what a rank says about its start, until cancelled."""
    while True:
        with contextlib.suppress(RayError):  # the start itself will say what is wrong
            for line in await _result(leader.progress.remote()):
                report(line)
        await asyncio.sleep(PROGRESS_POLL_S)


async def _end_of(actor: Any) -> str:
    """Why a rank has ended, or must be."""
    try:
        return str(await _result(actor.wait.remote()))
    except RayActorError:
        return "the process died"
    except RayError as error:
        return _reason(error)


async def _make_sure(pid: int) -> None:
    """A stopped (SIGSTOP) process hears no request to end; the kernel's signal always works."""
    deadline = time.monotonic() + KILL_GRACE_S
    while _is_alive(pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        await asyncio.sleep(0.02)


async def _result(reference: Any) -> Any:
    """The value of a Ray reference, without blocking the event loop."""
    return await asyncio.wrap_future(reference.future())


def _reason(error: RayError) -> str:
    """What happened, without the remote traceback."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        # The first line says what, the rest is advice about Ray.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        wanted = [line for line in lines if "Error:" in line] or lines
        return f"the process died: {wanted[-1] if wanted else type(error).__name__}"
    return f"{type(error).__name__}: {error}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True


@contextlib.contextmanager
def _neutral_directory(parent: str | None) -> Iterator[None]:
    """Work in an empty folder for a while.

    Ray puts the current folder on the import path of workers, where a user's own ``worker`` or
    ``services`` folder would hide ours, and its processes stay in it: so it is not removed with a
    parent given.
    """
    before = os.getcwd()
    empty = tempfile.mkdtemp(prefix="pageferry-empty-", dir=parent)
    os.chdir(empty)
    try:
        yield
    finally:
        os.chdir(before)
        if parent is None:
            os.rmdir(empty)
