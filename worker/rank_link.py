"""The connection between a leader and one follower: the log one way, facts the other.

Blocking sockets, one thread reading at each end. The end of the connection is the end of the
instance: it is how the ranks learn of each other's death, wherever they wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from typing_extensions import override

from transfer.wire import HEADER, Codec, FrameError, body_length
from worker.oplog import LOG_CODEC, LogEntries, StepChecksum
from worker.rank_facts import FACTS_CODEC, GroupFact, RankHello
from worker.recording import Follower

MessageT = TypeVar("MessageT")


class RankGone(ConnectionError):
    """The other end of a link is not there any more."""


def messages(connection: socket.socket, codec: Codec[MessageT]) -> Iterator[MessageT]:
    """Messages until the connection ends. Raises FrameError for what is none."""
    while True:
        try:
            header = _exactly(connection, HEADER.size)
            body = _exactly(connection, body_length(header))
        except OSError:
            return
        yield codec.decode_body(body)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise RankGone("the connection has ended")
        filled += count
    return bytes(data)


class FollowerLink(Follower):
    """The leader's end. ``apply`` and ``checksums`` are for the engine thread."""

    def __init__(self, connection: socket.socket, hello: RankHello) -> None:
        self._connection = connection
        self._checksums: list[StepChecksum] = []
        self._lock = threading.Lock()
        self.hello = hello

    @override
    def apply(self, entries: LogEntries) -> None:
        """Raises RankGone."""
        try:
            self._connection.sendall(LOG_CODEC.encode(entries))
        except OSError as error:
            raise RankGone(f"rank {self.hello.rank} is gone: {error}") from error

    @override
    def checksums(self) -> list[StepChecksum]:
        with self._lock:
            found, self._checksums = self._checksums, []
        return found

    def listen(self, report: Callable[[int, GroupFact], None]) -> None:
        """Pass on what the follower says until it is gone. Raises FrameError."""
        for message in messages(self._connection, FACTS_CODEC):
            if isinstance(message, StepChecksum):
                with self._lock:
                    self._checksums.append(message)
            elif isinstance(message, RankHello):
                raise FrameError("a follower says hello only once")
            else:
                report(self.hello.rank, message)

    def close(self) -> None:
        """End the connection, which ends ``listen`` too."""
        hang_up(self._connection)


class LeaderLink:
    """The follower's end. ``tell`` is for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, message: RankHello | StepChecksum | GroupFact) -> None:
        """Say something. Raises RankGone."""
        with self._lock:
            try:
                self._connection.sendall(FACTS_CODEC.encode(message))
            except OSError as error:
                raise RankGone(f"the leader is gone: {error}") from error

    def follow(self, apply: Callable[[LogEntries], None]) -> None:
        """Apply the log until the leader is gone."""
        for entries in messages(self._connection, LOG_CODEC):
            apply(entries)

    def close(self) -> None:
        """End the connection, which ends ``follow`` too."""
        hang_up(self._connection)


def hang_up(connection: socket.socket) -> None:
    """Wake whoever reads at either end."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
