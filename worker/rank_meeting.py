"""Where the ranks of an instance find each other: a private folder on their host.

Its name follows from the incarnation, whose nonce nobody guesses, and only this user may look into
it, so that neither the group's store nor the leader's socket needs a port or a proof.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from torch import distributed

from transfer.identity import Incarnation
from worker.config import WorkerConfig
from worker.model.dp_ranks import DpRanks
from worker.model.rank_sum import GroupSum
from worker.model.shard import Shard
from worker.rank_facts import FACTS_CODEC, RankHello
from worker.rank_link import FollowerLink, LeaderLink, messages

MEETING_TIMEOUT_S: Final = 300.0
"""Ranks load their parts at their own pace; then no sum waits longer for another rank."""
RETRY_S: Final = 0.05


def shard_of(config: WorkerConfig) -> Shard:
    """Which part of the model the process with this configuration has."""
    return Shard(config.rank, config.tensor_parallel_size, config.attention_dp_size)


class RankMeeting:
    """One rank's way to the others. Raises OSError for a folder that is somebody else's."""

    def __init__(self, incarnation: Incarnation, shard: Shard) -> None:
        self._shard = shard
        self._folder = Path(tempfile.gettempdir()) / f"pageferry-ranks-{incarnation.nonce}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not private or found.st_uid != os.getuid():
            raise PermissionError(f"{self._folder}: expected a private folder of this user")
        self._listener: socket.socket | None = None

    def join(self, device: torch.device, host: str) -> GroupSum:
        """Meet the others in a group for sums; ``host`` is where this rank's gloo listens."""
        if self._shard.rank == 0:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._socket_path)
            self._listener.listen(self._shard.size)
        store = distributed.FileStore(  # type: ignore[attr-defined]
            str(self._folder / "store"), self._shard.size
        )
        kind = GroupSum if self._shard.dp_size == 1 else DpRanks
        return kind.join(store, self._shard, device, host, MEETING_TIMEOUT_S)

    @property
    def _socket_path(self) -> str:
        return str(self._folder / "leader")

    def followers(self) -> tuple[FollowerLink, ...]:
        """Leader: wait for the hello of every other rank; in order of ranks. Nothing of the folder
        is needed any more, and it goes. Raises TimeoutError.
        """
        assert self._listener is not None
        links = []
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        with self._listener as listener:
            for _ in range(self._shard.size - 1):
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _address = listener.accept()
                connection.settimeout(None)
                hello = next(messages(connection, FACTS_CODEC), None)
                if not isinstance(hello, RankHello):
                    raise ConnectionError(f"expected a follower's hello, got {hello}")
                links.append(FollowerLink(connection, hello))
        self.leave()
        return tuple(sorted(links, key=lambda link: link.hello.rank))

    def leave(self) -> None:
        """Nobody else will come: the folder goes."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def leader(self, hello: RankHello) -> LeaderLink:
        """Follower, once in the group: connect to the leader. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._socket_path)
        link = LeaderLink(connection)
        link.tell(hello)
        return link
