"""The UCX transport: one worker a peer, dialling with error handling, openings that bind endpoints.

Endpoints are host:port with error handling: the only kind whose pending requests UCX ends when the
peer dies. The dialler's first bytes are a stream message, its opening; the listener's side posts
nothing else before the opening was accepted, and then answers, so a dialler knows that it is bound.
UCX itself listens on every interface of the host (as its own TCP lanes do); what a stranger can do
there is open an endpoint that is dropped for its wrong opening.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from transfer.transport import (
    Endpoint,
    Expectation,
    Transport,
    TransportAddress,
    TransportError,
    TransportFacts,
    TransportRequirementError,
    check_opening,
    check_requirement,
)
from transfer.ucx.driver import Driver
from transfer.ucx.endpoint import UcxEndpoint
from transfer.ucx.expectation import BOUND, UcxExpectation
from transfer.ucx.library import STATUS_OK, available_transports, load
from transfer.ucx.opening import Opening

logger = logging.getLogger(__name__)


class UcxTransport(Transport):
    """Any number of peers over one driver thread."""

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
        self._endpoints: set[UcxEndpoint] = set()
        self._expectations: set[UcxExpectation] = set()
        self._calls: set[asyncio.Future[Any]] = set()

    @override
    async def start(self) -> None:
        self._available = available_transports(await self._driver.start())
        try:
            check_requirement(self._required, self._available, "this host")
        except TransportRequirementError:
            await self.close()
            raise

    @override
    async def expect(self, opening: bytes) -> Expectation:
        check_opening(opening)
        expectation = UcxExpectation(self._driver, self._host, opening, self._required)
        expectation.listening(await self._call(expectation.listen))
        self._expectations.add(expectation)
        expectation.endpoint.add_done_callback(lambda future: self._expected(expectation, future))
        return expectation

    def _expected(self, expectation: UcxExpectation, future: asyncio.Future[Endpoint]) -> None:
        self._expectations.discard(expectation)
        if not future.cancelled():
            endpoint = future.result()
            assert isinstance(endpoint, UcxEndpoint)
            self._endpoints.add(endpoint)

    @override
    async def connect(
        self, address: TransportAddress, opening: bytes, *, timeout_s: float
    ) -> Endpoint:
        check_opening(opening)
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
        self._endpoints.discard(endpoint)
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
        for expectation in tuple(self._expectations):
            expectation.close()
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
            except (self._library.error, RuntimeError, TransportError) as error:
                ours = isinstance(error, TransportError)
                text = str(error) if ours else f"UCX: {type(error).__name__}: {error}"
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

    # What follows runs in the driver thread.

    def _dial(
        self, address: TransportAddress, opening: bytes, answered: asyncio.Future[bytes]
    ) -> UcxEndpoint:
        unit = self._driver.open_unit()
        try:
            raw = self._library.api.UCXEndpoint.create(
                unit.worker, address.host, address.port, endpoint_error_handling=True
            )
            endpoint = UcxEndpoint(self._driver, unit, raw)
        except (self._library.error, RuntimeError):
            self._driver.retire(unit)
            raise
        endpoint.owns_unit = True
        said = self._library.array(opening)
        self._driver.look(Opening(self._driver, endpoint, said, lambda text: _fail(answered, text)))
        answer = bytearray(len(BOUND))
        array = self._library.array(answer)

        def finished(status: int, text: str) -> None:
            if status == STATUS_OK and not answered.done():
                answered.set_result(bytes(answer))

        self._driver.watch(unit, raw.stream_recv(array), array, finished)
        return endpoint

    def _tear_down(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close_raw()
        self._endpoints.clear()


def _fail(future: asyncio.Future[Any], text: str) -> None:
    if not future.done():
        future.set_exception(TransportError(text))


def _nothing() -> None:
    """Only the round trip matters."""
