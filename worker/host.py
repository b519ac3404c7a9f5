"""One worker process: everything a rank is made of, put together from one configuration value.

Threads: the engine thread owns manager, cache and model; the IO thread (asyncio) owns the
front-end server and the transfer agent, whose transport has a driver thread of its own.
``python -m worker.host --config-json JSON`` runs the same thing without Ray and prints its
address as a line of JSON. With ``-`` the first line of standard input is the configuration. Each
later line is the incarnation of another worker whose process is dead, as whoever started it knows.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NoReturn

from pydantic import ValidationError

from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.deadlines import TransferLimits
from transfer.descriptors import raise_limit
from transfer.identity import Incarnation, PeerAddress
from transfer.lease import views_of_groups
from transfer.ucx.transport import UcxTransport
from worker.config import WorkerAddress, WorkerConfig
from worker.connection import WorkerFacts
from worker.core import MonotonicClock, RankCore, limit_threads, load_core, make_engine, warm_up
from worker.counters import Heartbeat
from worker.engine import Engine
from worker.facts import rank_info
from worker.inbox import Inbox, PairsChanged, Shutdown
from worker.io_thread import IoThread
from worker.log import configure_logging
from worker.page_memory import StoragePages
from worker.server import FrontEndServer

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""The engine thread waits for the interpreter no longer than this for each running thread."""
STOP_TIMEOUT_S = 5.0
HEALTH_S = 0.5
STOPPED = "stopped"
LOOK_S = 1.0
"""A wait that may last is never without an end. NVRTC, which cuDNN's attention uses, leaves signal
handlers behind that have the kernel resume such a wait: Python's own part of a handler, which runs
in the main thread between two instructions, would not come.
"""
END_TIMEOUT_S = 15.0
"""A process that is told to end is gone by then, whatever in it does not end. More than the parts
of an orderly end may take together.
"""


class WorkerProcess:
    """Composition and life of one worker process.

    ``start`` once, ``wait`` for its end, ``stop`` from any thread.
    """

    def __init__(self, config: WorkerConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._progress = progress
        self._clock = MonotonicClock()
        self._inbox = Inbox()
        self._ended = threading.Event()
        self._reason = STOPPED
        self._stopping = threading.Lock()
        self._io: IoThread | None = None
        self._agent: TransferAgent | None = None
        self._server: FrontEndServer | None = None
        self._engine_thread: threading.Thread | None = None

    def start(self) -> WorkerAddress:
        """Load the model, allocate pages, listen. Blocks.

        Raises whatever makes the worker unable to serve: ModelLoadError, ValueError for sizes that
        do not fit, TransportError, OSError for ports that are taken.
        """
        config = self._config
        if config.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: expected 1, got {config.tensor_parallel_size}; "
                "one rank holds the whole model"
            )
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        limit_threads(config)
        core = load_core(config, self._progress)
        self._progress("warming up")
        warm_up(core)
        self._io = IoThread()
        try:
            port = self._listen(core, self._io)
        except BaseException:
            self._close_io()
            raise
        # What is there now stays: collections need not look at it in the middle of a step.
        gc.collect()
        gc.freeze()
        assert self._engine_thread is not None
        self._engine_thread.start()
        self._progress(f"serving {config.model_name} as {config.role} on {config.host}:{port}")
        return WorkerAddress(
            incarnation=config.incarnation,
            role=config.role,
            host=config.host,
            port=port,
            pid=os.getpid(),
        )

    def wait(self) -> str:
        """Block until the worker must end and return the reason.

        ``stopped`` after :meth:`stop`; otherwise what made the worker unusable: an engine error,
        too many pages in quarantine, a dead transport.
        """
        while not self._ended.wait(LOOK_S):
            pass
        return self._reason

    def stop(self) -> None:
        """End in order: every leg, the engine, front ends, transfers. Idempotent, thread safe."""
        with self._stopping:
            self._inbox.put(Shutdown(STOPPED))
            if self._engine_thread is not None and self._engine_thread.is_alive():
                self._engine_thread.join(STOP_TIMEOUT_S)
            self._close_io()
            self._ended.set()

    def peer_dead(self, incarnation: Incarnation) -> None:
        """Whoever started the other process says that it is dead: nothing of it touches our
        pages.
        """
        if self._agent is not None:
            self._agent.peer_known_dead(incarnation)

    def _listen(self, core: RankCore, io: IoThread) -> int:
        """Start the agent and the server; make the engine. Returns the port for front ends."""
        config = self._config
        self._progress("starting the transport")
        agent, peer = io.run(self._start_agent(core))
        self._agent = agent
        heartbeat = Heartbeat()
        facts = WorkerFacts(
            incarnation=config.incarnation,
            role=config.role,
            model=config.model_name,
            tokens_per_block=core.plan.tokens_per_block,
            max_sequence_tokens=core.max_sequence_tokens,
            vocab_size=core.loaded.vocab_size,
            peer=peer,
            transport="ucx",
        )
        server, port = io.run(self._start_server(facts, heartbeat))
        self._server = server
        engine = make_engine(core, config, agent, server, self._clock)
        engine.heartbeat = heartbeat
        self._engine_thread = threading.Thread(
            target=self._run_engine, args=(engine,), name="pageferry-engine", daemon=True
        )
        return port

    async def _start_agent(self, core: RankCore) -> tuple[TransferAgent, PeerAddress]:
        config = self._config
        device = core.loaded.device
        info = rank_info(
            core.loaded,
            core.plan,
            model_path=config.model_path,
            model_name=config.model_name,
            incarnation=config.incarnation,
        )
        memory = StoragePages(core.storage)
        agent = TransferAgent(
            rank_info=info,
            instance=(info,),
            views=views_of_groups(core.plan),
            transport=UcxTransport(
                config.host,
                require_transport=config.require_transport,
                cuda_device=device.index if device.type == "cuda" else None,
            ),
            memory=memory,
            config=AgentConfig(
                host=config.host,
                cluster_token=config.cluster_token,
                control_port=config.control_port,
                limits=TransferLimits(floor_ms=config.transfer_timeout_ms),
                costs=memory.costs,
            ),
            deliver=self._inbox.put,
        )
        agent.watch_pairs(lambda: self._inbox.put(PairsChanged()))
        peer = await agent.start()
        self._watch(agent)
        return agent, peer

    async def _start_server(
        self, facts: WorkerFacts, heartbeat: Heartbeat
    ) -> tuple[FrontEndServer, int]:
        config = self._config
        server = FrontEndServer(
            facts,
            config.cluster_token,
            put=self._inbox.put,
            engine_age_ms=lambda: heartbeat.age_ms(self._clock.now_ms()),
        )
        return server, await server.start(config.host, config.port)

    def _watch(self, agent: TransferAgent) -> None:
        """A worker whose transport is dead must be replaced. Runs in the IO thread."""
        if agent.failure:
            self._inbox.put(Shutdown(f"the transport is dead: {agent.failure}"))
        elif not self._ended.is_set():
            asyncio.get_running_loop().call_later(HEALTH_S, self._watch, agent)

    def _run_engine(self, engine: Engine) -> None:
        try:
            reason = engine.run(self._inbox)
        except Exception as error:  # the thread's boundary: whatever it is, the worker is over
            logger.exception("the engine failed")
            reason = f"the engine failed: {error!r}"
        if reason != STOPPED:
            logger.error("the worker must end: %s", reason)
            self._reason = reason
            self._close_io()
        self._ended.set()

    def _close_io(self) -> None:
        """Cut front ends and peers, so that they turn to other workers at once."""
        io, self._io = self._io, None
        if io is None:
            return
        try:
            io.run(self._close_parts(), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("connections did not close within %g s", STOP_TIMEOUT_S)
        io.stop()

    async def _close_parts(self) -> None:
        if self._server is not None:
            await self._server.close()
        if self._agent is not None:
            await self._agent.close()


def hear_of_deaths(lines: Iterable[str], dead: Callable[[Incarnation], None]) -> None:
    """Pass on every incarnation that a line names, until there are no more lines."""
    for line in lines:
        try:
            incarnation = Incarnation.model_validate_json(line)
        except ValidationError as error:
            logger.warning("expected an incarnation as a line of JSON, got %r: %s", line, error)
        else:
            dead(incarnation)


def main(arguments: list[str] | None = None) -> int:
    """Run one worker until it is told to stop or must end."""
    parser = argparse.ArgumentParser(prog="python -m worker.host", description=__doc__)
    parser.add_argument("--config-json", required=True, help="a WorkerConfig; - for stdin")
    given = parser.parse_args(arguments).config_json
    text = sys.stdin.readline() if given == "-" else given
    configure_logging()
    faulthandler.enable()
    raise_limit()
    process = WorkerProcess(
        WorkerConfig.model_validate_json(text), lambda line: print(line, file=sys.stderr)
    )

    def stop(_signal: int, _frame: FrameType | None) -> None:
        end_by_force_later()
        threading.Thread(target=process.stop, daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    address = process.start()
    if given == "-":
        heard = (sys.stdin, process.peer_dead)
        threading.Thread(target=hear_of_deaths, args=heard, daemon=True).start()
    print(address.model_dump_json(), flush=True)
    reason = process.wait()
    end_by_force_later()
    process.stop()
    return 0 if reason == STOPPED else 1


def end_by_force_later() -> None:
    """In ``END_TIMEOUT_S`` say where every thread is and end. Needs no help of any thread then."""
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)


def leave(code: int) -> NoReturn:
    """End the process without what libraries do at exit: the destructors of CUDA and UCX may wait
    for what is not there any more, and the kernel takes everything back anyway.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
