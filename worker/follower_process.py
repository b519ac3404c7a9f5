"""One process that follows: its part of the model, its pages, its transfer agent, and the link to
the leader, whose end is this process's end.

The follower thread applies the log and computes; the agent lives in the IO thread, as in a leader.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable

from typing_extensions import override

from transfer.agent import TransferAgent
from transfer.agent_events import AgentEvent
from transfer.identity import Incarnation, PeerAddress
from worker.agent_start import start_agent
from worker.config import WorkerAddress, WorkerConfig
from worker.core import RankCore, limit_threads, load_core, warm_up
from worker.following import GroupFollower, RankFollower
from worker.io_thread import IoThread
from worker.process import (
    HEALTH_S,
    LOOK_S,
    STOP_TIMEOUT_S,
    STOPPED,
    SWITCH_INTERVAL_S,
    RankProcess,
)
from worker.rank_facts import RankHello
from worker.rank_link import LeaderLink, RankGone
from worker.rank_meeting import RankMeeting, shard_of

logger = logging.getLogger(__name__)

LEADER_GONE = "the leader is gone"


class FollowerProcess(RankProcess):
    """Composition and life of one process with a rank above 0."""

    def __init__(self, config: WorkerConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._progress = progress
        self._ended = threading.Event()
        self._reason = STOPPED
        self._closing = threading.Lock()
        self._io: IoThread | None = None
        self._agent: TransferAgent | None = None
        self._link: LeaderLink | None = None
        self._follower: RankFollower | None = None

    @override
    def start(self) -> WorkerAddress:
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        limit_threads(config)
        meeting = RankMeeting(config.incarnation, shard_of(config))
        core = load_core(config, meeting, self._progress)
        self._progress("warming up")
        warm_up(core)
        self._io = IoThread()
        try:
            self._follow(core, meeting, self._io)
        except BaseException:
            self._close()
            raise
        return WorkerAddress(
            incarnation=config.incarnation,
            role=config.role,
            host=config.host,
            port=0,
            pid=os.getpid(),
        )

    def _follow(self, core: RankCore, meeting: RankMeeting, io: IoThread) -> None:
        self._progress("starting the transport")
        agent, peer = io.run(self._start_agent(core))
        self._agent = agent
        self._link = link = meeting.leader(RankHello(rank=self._config.rank, peer=peer))
        follow = RankFollower if self._config.attention_dp_size == 1 else GroupFollower
        self._follower = follow(core.pages, agent, core.executor, link.tell)
        gc.collect()
        gc.freeze()
        threading.Thread(
            target=self._run, args=(link, self._follower), name="pageferry-follower", daemon=True
        ).start()
        self._progress(f"following as rank {self._config.rank}")

    async def _start_agent(self, core: RankCore) -> tuple[TransferAgent, PeerAddress]:
        agent, peer = await start_agent(self._config, core, self._report, lambda: None)
        self._watch(agent)
        return agent, peer

    def _watch(self, agent: TransferAgent) -> None:
        """An instance whose transport is dead must be replaced. Runs in the IO thread."""
        if agent.failure:
            self._end(f"the transport is dead: {agent.failure}")
        elif not self._ended.is_set():
            asyncio.get_running_loop().call_later(HEALTH_S, self._watch, agent)

    def _report(self, event: AgentEvent) -> None:
        """In the IO thread."""
        assert self._follower is not None
        try:
            self._follower.report(event)
        except RankGone as error:
            self._end(str(error))
        except Exception:
            # The leader would wait for what was not told.
            self._end(f"rank {self._config.rank} cannot tell of {event}")
            raise

    def _run(self, link: LeaderLink, follower: RankFollower) -> None:
        try:
            link.follow(follower.apply)
        except Exception as error:  # the thread's boundary: whatever it is, the rank is over
            logger.exception("rank %d failed", self._config.rank)
            self._end(f"rank {self._config.rank} failed: {error!r}")
        else:
            self._end(LEADER_GONE)
        self._close()

    def _end(self, reason: str) -> None:
        """Once ended it stays as it ended. Any thread."""
        if not self._ended.is_set():
            self._reason = reason
            if self._link is not None:
                self._link.close()
            self._ended.set()

    @override
    def wait(self) -> str:
        while not self._ended.wait(LOOK_S):
            pass
        return self._reason

    @override
    def stop(self) -> None:
        self._end(STOPPED)
        self._close()

    @override
    def peer_dead(self, incarnation: Incarnation) -> None:
        if self._agent is not None:
            self._agent.peer_known_dead(incarnation)

    def _close(self) -> None:
        with self._closing:
            io, self._io = self._io, None
            if io is None:
                return
            if self._agent is not None:
                try:
                    io.run(self._agent.close(), STOP_TIMEOUT_S)
                except TimeoutError:
                    logger.warning("connections did not close within %g s", STOP_TIMEOUT_S)
            io.stop()
