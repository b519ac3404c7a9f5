"""The seam between transfer sessions and whatever moves bytes: a few verbs and what they promise.

Two-sided only. A receive names its buffer, a send names a tag; sends and receives of one tag on
one pair match in the order in which they were posted. A posted request keeps its buffer alive and
*ends exactly once*, and before it has ended the buffer may be written, cancelled or not:
cancelling is a wish, ``ended`` is the fact that leases wait for.

Every method is called in the event loop that ran ``start``, and every callback runs there too.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from transfer.outcome import PostStatus
from transfer.page_staging import PageStaging

OPENING_BYTES: Final = 32
"""Length of the first message on an endpoint: a nonce agreed on the authenticated control
connection.
"""
TAG_BITS: Final = 64


class TransportError(ConnectionError):
    """A transport could not do what it was asked; the message says what was expected and what to
    do.
    """


class TransportRequirementError(TransportError):
    """The required transport is not there, or a pair does not use it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """How one request ended. ``LOST`` comes only where a remote process could itself reach the
    buffer (see ``remote_access``); everywhere else an endpoint that goes away ends its requests as
    ``REVOKED``, once this process's transport is through with the buffer.
    """

    status: PostStatus
    reason: str = ""
    """Empty for DONE."""


Ended = Callable[[Completion], None]
Lost = Callable[[str], None]


@dataclass(frozen=True)
class TransportAddress:
    """Where a transport accepts endpoints."""

    host: str
    port: int


@dataclass(frozen=True)
class TransportFacts:
    """What is loaded, for logs, metrics and ``pageferry doctor``."""

    kind: str
    library: str
    """Path of the loaded library; empty when there is none."""
    version: str
    available: tuple[str, ...]
    """Transports that endpoints may choose from, by name."""


class PageMemory(Protocol):
    """Turns slots into memory. Implemented by storage; the only place where transfer meets
    tensors.
    """

    @property
    def staging(self) -> PageStaging | None:
        """Gathers and scatters pages of this memory; None where nothing can."""

    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        """Memory of slots ``[first_slot, first_slot + num_slots)``: a writable, C-contiguous,
        one-dimensional uint8 buffer of ``num_slots * slot_bytes`` bytes that shares the pool's
        memory, a numpy array (host) or a CUDA tensor (device).
        """


class PostedRequest(ABC):
    """One posted send or receive."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the request has ended and its callback was called."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask that the request end early. It may still run to DONE: a matched receive goes on
        writing.
        """


class Endpoint(ABC):
    """One authenticated connection to one peer process."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the peer was lost or the endpoint closed; never true again."""

    @property
    @abstractmethod
    def lanes(self) -> tuple[str, ...]:
        """Names of the transports in use, such as ``sysv``, ``tcp``, ``cuda_ipc``."""

    @abstractmethod
    def on_lost(self, lost: Lost) -> None:
        """Call ``lost(reason)`` once when the peer closes or dies; at once (from the loop) if it
        already has.
        """

    @abstractmethod
    def post_send(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        """Send ``buffer``, which must stay unchanged until ``ended``. Raises ValueError for a
        buffer that isn't contiguous and for a tag of more than 64 bits.
        """

    @abstractmethod
    def post_receive(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        """Receive one message into ``buffer``. A longer message ends as REVOKED."""


class Expectation(ABC):
    """A listener for one peer, told apart from strangers by its opening."""

    @property
    @abstractmethod
    def address(self) -> TransportAddress:
        """Where the peer is to dial."""

    @property
    @abstractmethod
    def endpoint(self) -> asyncio.Future[Endpoint]:
        """Done when the peer has come; cancelled by :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """Expect the peer no more. An endpoint that has come is not touched. Idempotent."""


class Transport(ABC):
    """Listens, connects, and hands out endpoints."""

    @abstractmethod
    async def start(self) -> None:
        """Load and start what is needed. Raises TransportError."""

    @abstractmethod
    async def expect(self, opening: bytes) -> Expectation:
        """Listen for one peer. Nothing but an opening is received from any dialler before its
        opening was found to be this one; others are closed. A listener a peer, so that what a
        dying peer breaks is its own.
        """

    @abstractmethod
    async def connect(
        self, address: TransportAddress, opening: bytes, *, timeout_s: float
    ) -> Endpoint:
        """Dial and wait until the other side has accepted ``opening``. Raises TransportError."""

    @abstractmethod
    async def close_endpoint(self, endpoint: Endpoint) -> None:
        """Close at once, without waiting for the peer. Idempotent.

        Pending requests end, most of them before this returns, and each only when the transport
        is really through with it. A send that is DONE may not have arrived yet and is cut off:
        have the peer's word first.
        """

    @abstractmethod
    def facts(self) -> TransportFacts:
        """What is loaded. Valid after ``start``."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """Empty while the transport works; else why it never will again, so that the worker is not
        ready.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close every endpoint and stop. Idempotent; pending requests end first."""


def check_opening(opening: bytes) -> None:
    """Raise ValueError for an opening of another length than OPENING_BYTES."""
    if len(opening) != OPENING_BYTES:
        raise ValueError(f"opening: expected {OPENING_BYTES} bytes, got {len(opening)}")


def check_tag(tag: int) -> int:
    """The tag. Raises ValueError when it is no unsigned number of 64 bits."""
    if not 0 <= tag < 1 << TAG_BITS:
        raise ValueError(f"tag: expected 0 to 2**{TAG_BITS} - 1, got {tag}")
    return tag


SHARED_MEMORY_LANES: Final = frozenset({"sysv", "posix", "cma", "xpmem", "knem"})
RDMA_LANES: Final = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "srd"})
COPYING_LANES: Final = frozenset({"self", "tcp", "sysv", "posix"})
"""Lanes that move bytes through a queue: each side's own process touches its own pages, no other
does.
"""


def lane_kinds(lanes: tuple[str, ...]) -> frozenset[str]:
    """Lane names and the kinds they belong to: ``sysv`` is also ``shm``, ``rc_mlx5`` is also
    ``rdma``.
    """
    kinds = set(lanes)
    if kinds & SHARED_MEMORY_LANES:
        kinds.add("shm")
    if kinds & RDMA_LANES:
        kinds.add("rdma")
    return frozenset(kinds)


def remote_access(lanes: tuple[str, ...]) -> bool:
    """Whether a peer's process or device may read or write this process's pages by itself."""
    return not lanes or not COPYING_LANES.issuperset(lanes)


def main_lane(lanes: tuple[str, ...]) -> str:
    """The fastest kind among the lanes, which carries the pages: ``cuda_ipc``, ``rdma``, ``shm``,
    ``tcp``.
    """
    kinds = lane_kinds(lanes)
    for kind in ("cuda_ipc", "rdma", "shm", "self", "tcp"):
        if kind in kinds:
            return kind
    return lanes[0] if lanes else "none"


def check_requirement(required: str | None, lanes: tuple[str, ...], where: str) -> None:
    """Raise TransportRequirementError unless ``required`` (a lane name or a kind) is among
    ``lanes``.
    """
    if required is None or required in lane_kinds(lanes):
        return
    raise TransportRequirementError(
        f"{where}: expected transport {required!r}, got {', '.join(lanes) or 'none'}; see "
        "`pageferry doctor` for what this host can use, or drop --require-transport to accept a "
        "slower one"
    )
