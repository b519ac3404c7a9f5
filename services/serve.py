"""The life of one service: from a configuration to a ready endpoint, and to an end without orphans.

Order of the start: what can be refused at once (port, model, memory), then Ray and the front end,
then the instances. Order of the end: the front end first (it finishes what is in flight), then the
instances, then Ray. Whatever fails on the way, everything started is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from services.config import ServeConfig
from services.environment import (
    JOINED_RAY_VARIABLES,
    Environment,
    apply_environment,
    private_ray_variables,
)
from services.frontend_process import FrontEndProcess, bind
from services.instances import InstanceKeeper
from services.kv_cache import check_cache_holds_a_step, check_kv_types
from services.membership import FrontEndSettings
from services.models import ServedModel, find_model
from services.resources import (
    InstancePlan,
    estimate_weights_bytes,
    kv_cache_fraction,
    plan_instances,
    plan_remote_instances,
    probe_gpus,
    read_machine,
)
from services.step_limits import check_step_ways, step_limits
from services.terminal import Terminal
from services.tokenizer_cache import exported_tokenizer
from services.units import format_bytes
from transfer.identity import Incarnation
from worker.config import WorkerConfig

if TYPE_CHECKING:
    from services.launch import RayHost

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
READY_POLL_S: Final = 0.2
READY_TIMEOUT_S: Final = 30.0
"""Of one question to /ready: a canary request may run inside it."""


@dataclass(frozen=True, kw_only=True)
class ReadyService:
    """A service that answers."""

    host: str
    port: int
    model: str

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else self._plain_url

    @property
    def _plain_url(self) -> str:
        return f"http://{self.host}:{self.port}"


Work = Callable[[ReadyService], Awaitable[None]]
"""What to do with the service once it is ready; the service ends when this returns."""


def run_service(
    config: ServeConfig, environment: Environment, terminal: Terminal, work: Work
) -> None:
    """Bring the service up, run ``work``, take it down.

    SIGINT and SIGTERM end it early, which is no error. To be called in the main thread. Raises
    CommandError.
    """
    with contextlib.closing(bind(config.host, config.port)) as listener:
        model = find_model(
            config, environment.cache_directory, lambda text: terminal.update("model", text)
        )
        terminal.done("model", f"{model.name} ({model.path})")
        plans = _plan(config, model)
        check_kv_types(config, plans)
        check_step_ways(config, plans)
        check_cache_holds_a_step(config, plans, model.kv_elements_per_token)
        asyncio.run(_Launch(config, environment, terminal, model, plans, listener).run(work))


def _plan(config: ServeConfig, model: ServedModel) -> tuple[InstancePlan, ...]:
    if config.ray_address is not None:
        return plan_remote_instances(config)
    gpus = () if config.device == "cpu" else probe_gpus()
    return plan_instances(config, read_machine(gpus=gpus), estimate_weights_bytes(model.path))


def worker_config(
    config: ServeConfig,
    model: ServedModel,
    plan: InstancePlan,
    incarnation: Incarnation,
    host: str,
) -> WorkerConfig:
    """Configuration of one incarnation of one instance."""
    limits = step_limits(config, plan.device)
    return WorkerConfig(
        incarnation=incarnation,
        role=plan.role,
        model_path=str(model.path),
        model_name=model.name,
        device=plan.device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        host=host,
        cluster_token=config.cluster_token.get_secret_value(),
        tokens_per_block=config.tokens_per_block,
        kv_cache_bytes=plan.kv_cache_bytes,
        kv_cache_fraction=kv_cache_fraction(config),
        staging_pairs=plan.staging_pairs,
        host_cache_bytes=config.host_cache_bytes,
        max_sequence_tokens=config.max_sequence_tokens,
        max_batch_tokens=limits.tokens,
        max_running=limits.sequences,
        decode_graphs=config.decode_graphs,
        steps_under_way=config.steps_under_way,
        ctx_demote_uncached_tokens=config.ctx_demote_uncached_tokens,
        ctx_demote_max_iters=config.ctx_demote_max_iters,
        runtime_hooks=config.runtime_hooks,
        torch_threads=plan.torch_threads,
        tensor_parallel_size=plan.tensor_parallel_size,
        attention_dp_size=plan.attention_dp_size,
        dp_admission=config.dp_admission,
        transfer_timeout_ms=config.transfer_timeout_ms,
        require_transport=config.require_transport,
    )


class _Launch:
    """One run of the service."""

    def __init__(
        self,
        config: ServeConfig,
        environment: Environment,
        terminal: Terminal,
        model: ServedModel,
        plans: tuple[InstancePlan, ...],
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._environment = environment
        self._terminal = terminal
        self._model = model
        self._plans = plans
        self._listener = listener
        self._stop = asyncio.Event()
        self._tasks: tuple[asyncio.Task[Any], ...] = ()

    async def run(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        self._watch_signals()
        tokenizer = loop.create_task(self._export_tokenizer(), name="tokenizer")
        await asyncio.sleep(0)
        host = self._open_ray()
        # Once more: Ray has put its own handler in place of ours.
        self._watch_signals()
        try:
            if self._stop.is_set():
                return
            front_end = FrontEndProcess(self._listener)
            keeper = InstanceKeeper(host, self._plans, front_end.publish, self._terminal)
            await self._supervise(front_end, keeper, tokenizer, work)
        finally:
            tokenizer.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            host.close()

    def _watch_signals(self) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # Told twice: nothing is waited for any more, everything is killed.
            for task in self._tasks:
                task.cancel()
        self._stop.set()

    async def _supervise(
        self,
        front_end: FrontEndProcess,
        keeper: InstanceKeeper,
        tokenizer: asyncio.Task[str],
        work: Work,
    ) -> None:
        loop = asyncio.get_running_loop()
        stopping = loop.create_task(self._stop.wait(), name="stop")
        front_end_task = loop.create_task(
            self._run_front_end(front_end, tokenizer), name="front end"
        )
        keeper_task = loop.create_task(keeper.run(), name="instances")
        work_task = loop.create_task(self._when_ready(front_end, keeper, work), name="work")
        # In the order in which they are ended.
        self._tasks = tasks = (stopping, work_task, front_end_task, keeper_task)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._terminal.update("service", "stopping")
            for task in tasks:
                task.cancel()
                await asyncio.wait({task})
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and task in done:
                raise error
            if error is not None:
                logger.warning("%s: while stopping: %s", task.get_name(), error)

    async def _run_front_end(
        self, front_end: FrontEndProcess, tokenizer: asyncio.Task[str]
    ) -> None:
        """Instances load their models while the tokenizer is exported."""
        folder = await tokenizer
        self._terminal.update("front end", "starting")
        await front_end.run(self._settings(folder))

    async def _export_tokenizer(self) -> str:
        self._terminal.update("tokenizer", "exporting")
        folder = await exported_tokenizer(self._model.path, self._environment.cache_directory)
        self._terminal.done("tokenizer", str(folder))
        return str(folder)

    def _open_ray(self) -> RayHost:
        private = self._config.ray_address is None
        self._terminal.update("ray", "starting" if private else "connecting")
        apply_environment(private_ray_variables() if private else JOINED_RAY_VARIABLES)
        if not private:
            # Joining may block for a minute, deaf to our handlers, and leaves nothing to clean up.
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        # Only now: Ray reads these variables when it is imported, and takes a second for it.
        from services.launch import RayHost, RaySettings

        settings = RaySettings(
            address=self._config.ray_address,
            cluster_name=self._config.cluster_name or f"pageferry-{secrets.token_hex(4)}",
            startup_timeout_s=self._config.startup_timeout_ms / 1_000,
            worker_environment=dict(self._environment.forwarded),
        )
        host = RayHost.open(
            settings,
            lambda plan, incarnation, address: worker_config(
                self._config, self._model, plan, incarnation, address
            ),
        )
        self._terminal.done("ray", "up")
        return host

    def _settings(self, tokenizer_directory: str) -> FrontEndSettings:
        return FrontEndSettings(
            model=self._model.name,
            tokenizer_directory=tokenizer_directory,
            listen_fd=self._listener.fileno(),
            host=self._config.host,
            port=self._listener.getsockname()[1],
            cluster_token=self._config.cluster_token.get_secret_value(),
            expected_instances=tuple(plan.name for plan in self._plans),
            request_timeout_ms=self._config.request_timeout_ms,
            drain_timeout_ms=self._config.drain_timeout_ms,
            log_level=self._config.log_level,
            load_rule=self._config.load_rule.value,
            new_conversation_follow=self._config.new_conversation_follow.value,
            max_in_flight=self._config.max_in_flight,
        )

    async def _when_ready(
        self, front_end: FrontEndProcess, keeper: InstanceKeeper, work: Work
    ) -> None:
        port: int = self._listener.getsockname()[1]
        for plan in self._plans:
            known = plan.kv_cache_bytes
            memory = "to be measured" if known is None else format_bytes(known)
            self._terminal.update(plan.name, f"waiting ({plan.device}, KV cache {memory})")
        await front_end.listening()
        self._terminal.done("front end", f"listening on {self._config.host}:{port}")
        await keeper.all_up()
        await self._until_ready(port)
        self._terminal.done("service", "ready")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        await work(ReadyService(host=host, port=port, model=self._model.name))

    async def _until_ready(self, port: int) -> None:
        """Ask the service itself: it is ready when a request went through its workers."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        while True:
            state = await asyncio.to_thread(ask_ready, host, port)
            if state == "ready":
                return
            self._terminal.update("service", state)
            await asyncio.sleep(READY_POLL_S)


def ask_ready(host: str, port: int) -> str:
    """``ready``, or why not."""
    connection = http.client.HTTPConnection(host, port, timeout=READY_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"not answering: {error}"
    finally:
        connection.close()
    if response.status == 200:
        return "ready"
    try:
        reasons = json.loads(body).get("reasons", [])
    except (ValueError, AttributeError):
        reasons = []
    return "waiting" + (f": {'; '.join(str(reason) for reason in reasons)}" if reasons else "")
