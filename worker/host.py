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
from typing_extensions import override

from transfer.agent import TransferAgent
from transfer.descriptors import raise_limit
from transfer.identity import Incarnation, PeerAddress
from worker.agent_start import start_agent
from worker.config import WorkerAddress, WorkerConfig
from worker.connection import WorkerFacts
from worker.core import MonotonicClock, RankCore, limit_threads, load_core, make_engine, warm_up
from worker.counters import Heartbeat
from worker.engine import Engine
from worker.facts import kv_dtypes
from worker.follower_process import FollowerProcess
from worker.inbox import Inbox, PairsChanged, RankReported, Shutdown
from worker.io_thread import IoThread
from worker.log import configure_logging
from worker.process import HEALTH_S, LOOK_S, STOP_TIMEOUT_S, STOPPED, SWITCH_INTERVAL_S, RankProcess
from worker.rank_link import FollowerLink
from worker.rank_meeting import RankMeeting, shard_of
from worker.server import FrontEndServer

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 15.0
"""A process that is told to end is gone by then, whatever in it does not end. More than the parts
of an orderly end may take together.
"""


class WorkerProcess(RankProcess):
    """Composition and life of one process that leads: the only one of most instances."""

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
        self._meeting: RankMeeting | None = None
        self._links: tuple[FollowerLink, ...] = ()
        self._decided = threading.Lock()

    @override
    def start(self) -> WorkerAddress:
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        limit_threads(config)
        if config.tensor_parallel_size > 1:
            self._meeting = RankMeeting(config.incarnation, shard_of(config))
        try:
            core = load_core(config, self._meeting, self._progress)
            self._progress("warming up")
            warm_up(core)
            self._io = IoThread()
            port = self._listen(core, self._io)
        except BaseException:
            self._close_io()
            if self._meeting is not None:
                self._meeting.leave()
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

    @override
    def wait(self) -> str:
        while not self._ended.wait(LOOK_S):
            pass
        return self._reason

    @override
    def stop(self) -> None:
        """Every leg, the engine, front ends, transfers, then the other ranks."""
        with self._stopping:
            self._end_as(STOPPED)
            self._inbox.put(Shutdown(STOPPED))
            engine = self._engine_thread
            # Once the process has ended badly its engine may be waiting in a sum.
            if engine is not None and engine.is_alive() and not self._ended.is_set():
                engine.join(STOP_TIMEOUT_S)
            self._close_io()
            self._ended.set()

    @override
    def peer_dead(self, incarnation: Incarnation) -> None:
        if self._agent is not None:
            self._agent.peer_known_dead(incarnation)

    def _listen(self, core: RankCore, io: IoThread) -> int:
        """Start the agent and the server; make the engine. Returns the port for front ends."""
        config = self._config
        self._progress("starting the transport")
        agent, peer = io.run(self._start_agent(core))
        self._agent = agent
        if self._meeting is not None:
            self._links = self._meeting.followers()
            peer = peer.leading([link.hello.peer for link in self._links])
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
            kv_dtype=kv_dtypes(core.loaded.specs),
        )
        server, port = io.run(self._start_server(facts, heartbeat))
        self._server = server
        engine = make_engine(core, config, agent, server, self._clock, self._links)
        engine.heartbeat = heartbeat
        for link in self._links:
            threading.Thread(target=self._listen_to, args=(link,), daemon=True).start()
        self._engine_thread = threading.Thread(
            target=self._run_engine, args=(engine,), name="pageferry-engine", daemon=True
        )
        return port

    async def _start_agent(self, core: RankCore) -> tuple[TransferAgent, PeerAddress]:
        agent, peer = await start_agent(
            self._config,
            core,
            self._inbox.put,
            lambda: self._inbox.put(PairsChanged()),
        )
        self._watch(agent)
        return agent, peer

    def _listen_to(self, link: FollowerLink) -> None:
        """One rank's death is that of the instance. Whatever the engine is doing, the process
        ends.
        """
        rank = link.hello.rank
        reason = f"rank {rank} is gone"
        try:
            link.listen(lambda rank, fact: self._inbox.put(RankReported(rank, fact)))
        except Exception as error:  # the thread's boundary
            logger.exception("what rank %d says is not understood", rank)
            reason = f"rank {rank}: {error!r}"
        if self._end_as(reason):
            self._inbox.put(Shutdown(reason))
            self._close_io()
            self._ended.set()

    def _end_as(self, reason: str) -> bool:
        """Note why the process ends. False when that is known already: the first reason counts."""
        if not self._decided.acquire(blocking=False):
            return False
        self._reason = reason
        if reason != STOPPED:
            logger.error("the worker must end: %s", reason)
        return True

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
        if self._end_as(reason):
            self._close_io()
        self._ended.set()

    def _close_io(self) -> None:
        """Cut front ends and peers, so that they turn to other workers at once."""
        for link in self._links:
            link.close()
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


def rank_process(config: WorkerConfig, progress: Callable[[str], None]) -> RankProcess:
    """The process that this configuration is for, not started."""
    return FollowerProcess(config, progress) if config.rank else WorkerProcess(config, progress)


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
    process = rank_process(
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
