"""Transport between agents of one process, for tests: the semantics of UCX without its library.

A :class:`Network` holds all transports and moves messages only when the loop runs its callbacks, in
pieces of ``piece_bytes``, so a test can look, cancel or kill between two. As in UCX, a matched
receive goes on writing after ``cancel``, and ``freeze`` is a peer that neither moves nor dies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transfer.outcome import PostStatus
from transfer.transport import (
    Completion,
    Ended,
    Endpoint,
    Expectation,
    Lost,
    PostedRequest,
    Transport,
    TransportAddress,
    TransportError,
    TransportFacts,
    check_opening,
    check_tag,
    remote_access,
)

PIECE_BYTES = 1 << 16


class Network:
    """The wire between in-process transports."""

    def __init__(
        self, *, piece_bytes: int = PIECE_BYTES, lanes: tuple[str, ...] = ("self",)
    ) -> None:
        """``lanes`` decides, as for UCX, whether a lost endpoint leaves requests in doubt."""
        self.piece_bytes = piece_bytes
        self.lanes = lanes
        self._listeners: dict[TransportAddress, InProcessExpectation] = {}
        self._next_port = 1

    def transport(self, host: str) -> InProcessTransport:
        """A new transport of this network."""
        return InProcessTransport(self, host)

    def kill(self, transport: InProcessTransport) -> None:
        """What SIGKILL of the process would do: it moves nothing more, its peers see it die."""
        transport.die()

    def listen(self, transport: InProcessTransport, opening: bytes) -> InProcessExpectation:
        """Take a free port."""
        address = TransportAddress(transport.host, self._next_port)
        self._next_port += 1
        expectation = InProcessExpectation(transport, address, opening)
        self._listeners[address] = expectation
        return expectation

    def listener(self, address: TransportAddress) -> InProcessExpectation:
        """Raises TransportError when nothing listens there."""
        try:
            return self._listeners[address]
        except KeyError:
            raise TransportError(f"nothing listens at {address.host}:{address.port}") from None

    def leave(self, expectation: InProcessExpectation) -> None:
        """Stop listening."""
        self._listeners.pop(expectation.address, None)

    def expectations(self, transport: InProcessTransport) -> tuple[InProcessExpectation, ...]:
        """Whom a transport still expects."""
        return tuple(e for e in self._listeners.values() if e.transport is transport)


class InProcessRequest(PostedRequest):
    """One side of a message."""

    def __init__(self, endpoint: InProcessEndpoint, buffer: object, ended: Ended) -> None:
        self.data = _bytes_of(buffer)
        self.matched = False
        self._endpoint = endpoint
        self._callback = ended
        self._ended = False

    @property
    @override
    def ended(self) -> bool:
        return self._ended

    @override
    def cancel(self) -> None:
        if not self._ended and not self.matched:
            self._endpoint.withdraw(self)
            self.finish(PostStatus.REVOKED, "cancelled")

    def finish(self, status: PostStatus, reason: str = "") -> None:
        """End once; the callback runs from the loop, as with any transport."""
        if self._ended:
            return
        self._ended = True
        asyncio.get_running_loop().call_soon(self._callback, Completion(status, reason))


@dataclass
class _Transfer:
    send: InProcessRequest
    receive: InProcessRequest
    moved: int = 0


@dataclass
class _Queues:
    """Messages of one tag towards one endpoint."""

    sends: deque[InProcessRequest] = field(default_factory=deque)
    receives: deque[InProcessRequest] = field(default_factory=deque)


class InProcessEndpoint(Endpoint):
    """One end of a pair."""

    def __init__(self, transport: InProcessTransport) -> None:
        self.transport = transport
        self.other: InProcessEndpoint = self
        self.queues: dict[int, _Queues] = {}
        """By tag: what the other side sent and this side receives."""
        self._moving: list[_Transfer] = []
        self._alive = True
        self._lost: list[Lost] = []
        self._lost_reason = ""

    @property
    @override
    def alive(self) -> bool:
        return self._alive

    @property
    @override
    def lanes(self) -> tuple[str, ...]:
        return self.transport.network.lanes

    @override
    def on_lost(self, lost: Lost) -> None:
        if self._alive:
            self._lost.append(lost)
        else:
            asyncio.get_running_loop().call_soon(lost, self._lost_reason)

    @override
    def post_send(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        check_tag(tag)
        request = InProcessRequest(self, buffer, ended)
        if self._alive:
            self.other.queues.setdefault(tag, _Queues()).sends.append(request)
            self.other.match(tag)
        else:
            request.finish(PostStatus.REVOKED, "endpoint was already closed")
        return request

    @override
    def post_receive(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        check_tag(tag)
        request = InProcessRequest(self, buffer, ended)
        if self._alive:
            self.queues.setdefault(tag, _Queues()).receives.append(request)
            self.match(tag)
        else:
            request.finish(PostStatus.REVOKED, "endpoint was already closed")
        return request

    def withdraw(self, request: InProcessRequest) -> None:
        """Take an unmatched request out of its queue."""
        for queues in (*self.queues.values(), *self.other.queues.values()):
            for queue in (queues.sends, queues.receives):
                if request in queue:
                    queue.remove(request)

    def match(self, tag: int) -> None:
        """Pair the oldest send with the oldest receive of ``tag``, as long as both are there."""
        queues = self.queues[tag]
        while queues.sends and queues.receives:
            transfer = _Transfer(queues.sends.popleft(), queues.receives.popleft())
            transfer.send.matched = transfer.receive.matched = True
            self._moving.append(transfer)
            asyncio.get_running_loop().call_soon(self._move, transfer)

    def _move(self, transfer: _Transfer) -> None:
        if transfer not in self._moving:
            return
        if self.transport.frozen or self.other.transport.frozen:
            asyncio.get_running_loop().call_later(0.001, self._move, transfer)
            return
        source, target = transfer.send.data, transfer.receive.data
        if len(source) > len(target):
            self._moving.remove(transfer)
            transfer.receive.finish(PostStatus.REVOKED, "message is longer than the buffer")
            transfer.send.finish(PostStatus.DONE)
            return
        end = min(transfer.moved + self.transport.network.piece_bytes, len(source))
        target[transfer.moved : end] = source[transfer.moved : end]
        transfer.moved = end
        if end < len(source):
            asyncio.get_running_loop().call_soon(self._move, transfer)
            return
        self._moving.remove(transfer)
        transfer.receive.finish(PostStatus.DONE)
        transfer.send.finish(PostStatus.DONE)

    def end(self, reason: str, other_reason: str) -> None:
        """Break the pair: everything pending on both ends ends, each with its side's reason."""
        if not self._alive:
            return
        moving = self._moving + self.other._moving
        mine = [t.receive for t in self._moving] + [t.send for t in self.other._moving]
        theirs = [t.send for t in self._moving] + [t.receive for t in self.other._moving]
        for queues in self.queues.values():
            mine += queues.receives
            theirs += queues.sends
        for queues in self.other.queues.values():
            theirs += queues.receives
            mine += queues.sends
        for transfer in moving:
            transfer.moved = len(transfer.send.data)
        self._break(mine, reason)
        self.other._break(theirs, other_reason)

    def _break(self, requests: list[InProcessRequest], reason: str) -> None:
        self._alive = False
        self._lost_reason = reason
        self._moving.clear()
        self.queues.clear()
        self.transport.endpoints.discard(self)
        if self.transport.dead:
            return
        for request in requests:
            request.finish(self.transport.lost_status, reason)
        callbacks, self._lost = self._lost, []
        for lost in callbacks:
            asyncio.get_running_loop().call_soon(lost, reason)


class InProcessExpectation(Expectation):
    """A listener of one simulated process."""

    def __init__(
        self, transport: InProcessTransport, address: TransportAddress, opening: bytes
    ) -> None:
        self.transport = transport
        self._address = address
        self._opening = opening
        self._endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()

    @property
    @override
    def address(self) -> TransportAddress:
        return self._address

    @property
    @override
    def endpoint(self) -> asyncio.Future[Endpoint]:
        return self._endpoint

    @override
    def close(self) -> None:
        self.transport.network.leave(self)
        self._endpoint.cancel()

    def admit(self, opening: bytes, endpoint: Endpoint) -> bool:
        """Whether the dialler is the expected one."""
        if opening != self._opening or self._endpoint.done():
            return False
        self.transport.network.leave(self)
        self._endpoint.set_result(endpoint)
        return True


class InProcessTransport(Transport):
    """One simulated process."""

    def __init__(self, network: Network, host: str) -> None:
        self.network = network
        self.frozen = False
        """True: nothing from or to this transport moves, as if the process were stopped."""
        self.dead = False
        self.endpoints: set[InProcessEndpoint] = set()
        self.host = host
        self._failure = ""

    @property
    def lost_status(self) -> PostStatus:
        """How requests of a lost endpoint end here."""
        remote = remote_access(self.network.lanes)
        return PostStatus.LOST if remote else PostStatus.REVOKED

    @override
    async def start(self) -> None:
        await asyncio.sleep(0)

    @override
    async def expect(self, opening: bytes) -> Expectation:
        check_opening(opening)
        await asyncio.sleep(0)
        return self.network.listen(self, opening)

    @override
    async def connect(
        self, address: TransportAddress, opening: bytes, *, timeout_s: float
    ) -> Endpoint:
        check_opening(opening)
        expectation = self.network.listener(address)
        await asyncio.sleep(0)
        mine, theirs = InProcessEndpoint(self), InProcessEndpoint(expectation.transport)
        mine.other, theirs.other = theirs, mine
        self.endpoints.add(mine)
        expectation.transport.endpoints.add(theirs)
        if not expectation.admit(opening, theirs):
            theirs.end("closed here", "the peer closed the endpoint or died")
            raise TransportError(f"{address.host}:{address.port} refused the opening")
        return mine

    @override
    async def close_endpoint(self, endpoint: Endpoint) -> None:
        if not isinstance(endpoint, InProcessEndpoint):
            raise TypeError(
                f"expected an endpoint of this transport, got {type(endpoint).__name__}"
            )
        endpoint.end("closed here", "the peer closed the endpoint or died")
        await asyncio.sleep(0)

    @override
    def facts(self) -> TransportFacts:
        return TransportFacts("in-process", "", "", self.network.lanes)

    @property
    @override
    def failure(self) -> str:
        return self._failure

    def fail(self, reason: str) -> None:
        """What the death of a driver thread would do."""
        self._failure = reason

    @override
    async def close(self) -> None:
        for expectation in self.network.expectations(self):
            expectation.close()
        for endpoint in tuple(self.endpoints):
            await self.close_endpoint(endpoint)

    def die(self) -> None:
        """End as a killed process does: no callback of its own, a reset at every peer."""
        self.dead = True
        for expectation in self.network.expectations(self):
            self.network.leave(expectation)
        for endpoint in tuple(self.endpoints):
            endpoint.end("dead", "the peer closed the endpoint or died")


def _bytes_of(buffer: object) -> npt.NDArray[np.uint8]:
    """The buffer's own bytes, flat. Raises ValueError when it isn't contiguous."""
    array = np.asarray(buffer)
    if not array.flags.c_contiguous:
        raise ValueError(
            f"transfer buffer: expected C-contiguous memory, got shape {array.shape} strides "
            f"{array.strides}; send whole slots"
        )
    return array.reshape(-1).view(np.uint8)
