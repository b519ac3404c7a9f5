"""The sending half of one connection, for any thread.

A thread that has something to say hands it to the kernel itself: to wake the IO thread for it would
cost more than the call, and the engine would wait for the interpreter meanwhile. Only what the
socket does not take at once is left to the loop. Bytes leave in the order of the calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Final

from transfer.loops import call_in

FINISH_TIMEOUT_S: Final = 10.0


class Outlet:
    """Never blocks. Make and ``finish`` it in the loop's thread; ``send`` and ``abort`` are for
    any.
    """

    def __init__(self, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = writer.transport
        self._loop = loop
        # asyncio does not watch a transport's own descriptor for anybody else.
        number = os.dup(writer.get_extra_info("socket").fileno())
        self._socket = socket.socket(fileno=number)
        self._socket.settimeout(0)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._finished = False
        self._finishing = False
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """What the socket has not taken yet."""
        return len(self._waiting)

    def send(self, frames: bytes) -> None:
        """Queue encoded messages; an outlet that is finished takes none."""
        with self._lock:
            if self._finished:
                return
            if self._waiting:
                self._waiting += frames
                return
            taken = self._take(frames)
            if taken == len(frames) or self._closed:
                return
            self._waiting += memoryview(frames)[taken:]
        call_in(self._loop, self._watch)

    def finish(self) -> None:
        """Close the connection once everything queued is sent, and in any case after
        ``FINISH_TIMEOUT_S``: a peer that reads no more must not hold the socket. Idempotent.
        """
        with self._lock:
            if self._closed or self._finishing:
                return
            self._finished = self._finishing = True
            if self._waiting:
                self._loop.call_later(FINISH_TIMEOUT_S, self._abort)
            else:
                self._close()

    def abort(self) -> None:
        """Close the connection now. Idempotent."""
        call_in(self._loop, self._abort)

    def _abort(self) -> None:
        with self._lock:
            self._close()

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        with self._lock:
            if self._closed:
                return
            del self._waiting[: self._take(self._waiting)]
            if self._waiting or self._closed:
                return
            self._loop.remove_writer(self._socket.fileno())
            if self._finished:
                self._close()

    def _take(self, frames: bytes | bytearray) -> int:
        """How many bytes the socket took. The reader learns of a connection that is lost."""
        try:
            return self._socket.send(frames)
        except BlockingIOError:
            return 0
        except OSError:
            self._finished = True
            call_in(self._loop, self._abort)
            return len(frames)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = self._finished = True
        self._waiting.clear()
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._transport.abort()
