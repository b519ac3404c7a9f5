"""The UCX transport: a listener, dialling with error handling, and openings that bind endpoints.

Endpoints are host:port with error handling: the only kind whose pending requests UCX ends when the
peer dies. The dialer's first bytes are a stream message, its opening; the listener's side posts
nothing else before the opening was accepted, and then answers, so a dialer knows that it is bound.
UCX itself listens on every interface of the host (as its own TCP lanes do); what a stranger can do
there is open an endpoint that is dropped for its wrong opening.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from typing_extensions import override

from transfer.transport import (
    OPENING_BYTES,
    Accept,
    Endpoint,
    Transport,
    TransportAddress,
    TransportError,
    TransportFacts,
    TransportRequirementError,
    check_requirement,
)
from transfer.ucx.driver import Driver
from transfer.ucx.endpoint import UcxEndpoint
from transfer.ucx.library import STATUS_OK, available_transports, load

logger = logging.getLogger(__name__)

OPENING_TIMEOUT_S: Final = 5.0
"""A dialer that has not said its opening by then is dropped."""
MAX_UNBOUND: Final = 64
"""Accepted endpoints that have not said their opening; more are dropped at once."""
BOUND: Final = b"pageferry endpoint bound".ljust(OPENING_BYTES, b".")


class UcxTransport(Transport):
    """One listener and any number of endpoints over one driver thread."""

    def __init__(
        self,
        host: str,
        *,
        require_transport: str | None = None,
        cuda_device: int | None = None,
    ) -> None:
        """``host`` is the address that peers are told to dial. ``require_transport`` names a lane
        (``sysv``, ``cuda_ipc``) or a kind (``shm``, ``rdma``) without which neither this process
        nor a pair is accepted. ``cuda_device`` is the visible device whose memory is sent; the
        driver thread makes its context current, as UCX's CUDA lanes need.
        """
        self._host = host
        self._required = require_transport
        self._library = load()
        self._driver = Driver(self._library, self._driver_failed, cuda_device)
        self._failure = ""
        self._closed = False
        self._available: tuple[str, ...] = ()
        self._accept: Accept | None = None
        self._endpoints: set[UcxEndpoint] = set()
        self._unbound: dict[UcxEndpoint, asyncio.TimerHandle] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._listener: Any = None

    @override
    async def start(self, accept: Accept) -> TransportAddress:
        self._accept = accept
        self._available = available_transports(await self._driver.start())
        try:
            check_requirement(self._required, self._available, "this host")
        except TransportRequirementError:
            await self.close()
            raise
        port: int = await self._call(self._listen)
        return TransportAddress(self._host, port)

    @override
    async def connect(
        self, address: TransportAddress, opening: bytes, *, timeout_s: float
    ) -> Endpoint:
        if len(opening) != OPENING_BYTES:
            raise ValueError(f"opening: expected {OPENING_BYTES} bytes, got {len(opening)}")
        self._check_open()
        where = f"{address.host}:{address.port}"
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        endpoint: UcxEndpoint = await self._call(lambda: self._dial(address, opening, answered))
        self._endpoints.add(endpoint)
        endpoint.on_lost(lambda reason: _fail(answered, f"UCX endpoint to {where}: {reason}"))
        try:
            await self._bound(endpoint, where, answered, timeout_s)
        except TimeoutError:
            await self.close_endpoint(endpoint)
            raise TransportError(
                f"UCX endpoint to {where}: not accepted within {timeout_s:g} s; is the peer alive, "
                "and the port open between the hosts?"
            ) from None
        except (TransportError, asyncio.CancelledError):
            await self.close_endpoint(endpoint)
            raise
        return endpoint

    async def _bound(
        self, endpoint: UcxEndpoint, where: str, answered: asyncio.Future[bytes], timeout_s: float
    ) -> None:
        if await asyncio.wait_for(answered, timeout_s) != BOUND:
            raise TransportError(f"UCX endpoint to {where}: the listener is no pageferry worker")
        await self._call(endpoint.query_lanes)
        endpoint.check_lanes(self._required)

    @override
    async def close_endpoint(self, endpoint: Endpoint) -> None:
        if not isinstance(endpoint, UcxEndpoint):
            raise TypeError(
                f"expected an endpoint of this transport, got {type(endpoint).__name__}"
            )
        self._forget(endpoint)
        endpoint.close_here()
        if self._failure or self._closed:
            return
        with contextlib.suppress(TransportError):
            await self._call(_nothing)
            # Endings travel one round after the close itself.
            await self._call(_nothing)

    @override
    def facts(self) -> TransportFacts:
        version = ".".join(str(part) for part in self._library.version)
        return TransportFacts("ucx", self._library.path, version, self._available)

    @property
    @override
    def failure(self) -> str:
        return self._failure

    @override
    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in self._unbound.values():
            timer.cancel()
        self._unbound.clear()
        for endpoint in self._endpoints:
            endpoint.closing = True
        await self._driver.stop(self._tear_down)

    def driver_cpu_seconds(self) -> float:
        """CPU time of the driver thread so far."""
        return self._driver.cpu_seconds()

    def _check_open(self) -> None:
        if self._failure or self._closed:
            raise TransportError(self._failure or "the UCX transport is closed")

    async def _call(self, command: Callable[[], Any]) -> Any:
        """Run ``command`` in the driver thread and return what it returns; UCX errors become
        TransportError.
        """
        self._check_open()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                value = command()
            except (self._library.error, RuntimeError) as error:
                text = f"UCX: {type(error).__name__}: {error}"
                self._driver.deliver(lambda: _fail(future, text))
            else:
                self._driver.answer(future, value)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._driver.submit(run)
        return await future

    def _driver_failed(self, reason: str) -> None:
        self._failure = reason
        logger.error("%s", reason)
        for call in tuple(self._calls):
            _fail(call, reason)

    def _forget(self, endpoint: UcxEndpoint) -> None:
        self._endpoints.discard(endpoint)
        timer = self._unbound.pop(endpoint, None)
        if timer is not None:
            timer.cancel()

    # What follows runs in the driver thread.

    def _listen(self) -> int:
        self._listener = self._library.api.UCXListener.create(
            self._driver.worker, 0, self._dialled, deliver_endpoint=True
        )
        return int(self._listener.port)

    def _dialled(self, raw: Any) -> None:
        """UCX's callback from inside progress, where nothing may be posted."""
        self._driver.submit(lambda: self._read_opening(raw))

    def _read_opening(self, raw: Any) -> None:
        try:
            endpoint = UcxEndpoint(self._driver, raw)
        except RuntimeError:
            return  # gone already
        buffer = bytearray(OPENING_BYTES)
        array = self._library.array(buffer)

        def opened(status: int) -> None:
            endpoint.query_lanes()
            self._driver.deliver(lambda: self._opened(endpoint, bytes(buffer), status))

        self._driver.deliver(lambda: self._admit(endpoint))
        if endpoint.usable():
            self._driver.watch(
                raw.stream_recv(array),
                array,
                lambda status, text: self._driver.submit(lambda: opened(status)),
            )

    def _dial(
        self, address: TransportAddress, opening: bytes, answered: asyncio.Future[bytes]
    ) -> UcxEndpoint:
        raw = self._library.api.UCXEndpoint.create(
            self._driver.worker, address.host, address.port, endpoint_error_handling=True
        )
        endpoint = UcxEndpoint(self._driver, raw)
        said = self._library.array(opening)
        self._driver.watch(raw.stream_send(said), said, _ignore)
        answer = bytearray(OPENING_BYTES)
        array = self._library.array(answer)

        def finished(status: int, text: str) -> None:
            if status == STATUS_OK and not answered.done():
                answered.set_result(bytes(answer))

        self._driver.watch(raw.stream_recv(array), array, finished)
        return endpoint

    def _welcome(self, endpoint: UcxEndpoint) -> None:
        if endpoint.usable():
            said = self._library.array(BOUND)
            self._driver.watch(endpoint.raw.stream_send(said), said, _ignore)

    def _tear_down(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close_raw()
        self._endpoints.clear()
        self._listener = None

    # What follows runs in the loop.

    def _admit(self, endpoint: UcxEndpoint) -> None:
        self._endpoints.add(endpoint)
        if len(self._unbound) >= MAX_UNBOUND:
            self._drop(endpoint)
            return
        loop = asyncio.get_running_loop()
        self._unbound[endpoint] = loop.call_later(OPENING_TIMEOUT_S, self._drop, endpoint)
        endpoint.on_lost(lambda reason: self._drop(endpoint) if endpoint in self._unbound else None)

    def _opened(self, endpoint: UcxEndpoint, opening: bytes, status: int) -> None:
        if endpoint not in self._unbound:
            return  # dropped meanwhile
        self._unbound.pop(endpoint).cancel()
        if status == STATUS_OK and self._admissible(opening, endpoint):
            self._driver.submit(lambda: self._welcome(endpoint))
        else:
            self._drop(endpoint)

    def _admissible(self, opening: bytes, endpoint: UcxEndpoint) -> bool:
        try:
            endpoint.check_lanes(self._required)
        except TransportRequirementError as error:
            logger.warning("refused an endpoint: %s", error)
            return False
        return self._accept is not None and self._accept(opening, endpoint)

    def _drop(self, endpoint: UcxEndpoint) -> None:
        self._forget(endpoint)
        endpoint.close_here()


def _fail(future: asyncio.Future[Any], text: str) -> None:
    if not future.done():
        future.set_exception(TransportError(text))


def _ignore(status: int, text: str) -> None:
    """An opening that could not be said shows as a lost endpoint."""


def _nothing() -> None:
    """Only the round trip matters."""
