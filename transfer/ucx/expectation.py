"""A UCX listener for one dialler, known by its opening."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from typing_extensions import override

from transfer.transport import (
    OPENING_BYTES,
    Endpoint,
    Expectation,
    TransportAddress,
    TransportRequirementError,
)
from transfer.ucx.driver import Driver, Unit
from transfer.ucx.endpoint import UcxEndpoint
from transfer.ucx.library import STATUS_OK

logger = logging.getLogger(__name__)

OPENING_TIMEOUT_S: Final = 5.0
"""A dialler that has not said its opening by then is dropped."""
MAX_UNBOUND: Final = 16
"""Diallers that have not said their opening; more are dropped at once."""
BOUND: Final = b"pageferry endpoint bound".ljust(OPENING_BYTES, b".")


class UcxExpectation(Expectation):
    """Posts nothing for a dialler but the receive of its opening; the right one gets the unit."""

    def __init__(self, driver: Driver, host: str, opening: bytes, required: str | None) -> None:
        self._driver = driver
        self._opening = opening
        self._required = required
        self._address = TransportAddress(host, 0)
        self._endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._unbound: dict[UcxEndpoint, asyncio.TimerHandle] = {}
        self._unit: Unit | None = None
        self._closed = False

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
        if self._closed:
            return
        self._closed = True
        for endpoint in tuple(self._unbound):
            self._drop(endpoint)
        if self._endpoint.cancel():
            self._driver.submit(self.retire)

    def listening(self, port: int) -> None:
        """The loop learns the port."""
        self._address = TransportAddress(self._address.host, port)

    # What follows runs in the driver thread.

    def listen(self) -> int:
        """Open a worker and listen on a free port of every interface; UCX offers no choice."""
        unit = self._driver.open_unit()
        self._unit = unit
        unit.listener = self._driver.library.api.UCXListener.create(
            unit.worker, 0, self._dialled, deliver_endpoint=True
        )
        return int(unit.listener.port)

    def retire(self) -> None:
        """Stop listening."""
        if self._unit is not None:
            self._driver.retire_listening(self._unit)

    def _dialled(self, raw: Any) -> None:
        """UCX's callback from inside progress, where nothing may be posted."""
        self._driver.submit(lambda: self._read_opening(raw))

    def _read_opening(self, raw: Any) -> None:
        unit = self._unit
        if unit is None or unit.retired:
            return
        try:
            endpoint = UcxEndpoint(self._driver, unit, raw)
        except RuntimeError:
            return  # gone already
        buffer = bytearray(OPENING_BYTES)
        array = self._driver.library.array(buffer)

        def opened(status: int) -> None:
            endpoint.query_lanes()
            self._driver.deliver(lambda: self._opened(endpoint, bytes(buffer), status))

        self._driver.deliver(lambda: self._admit(endpoint))
        if endpoint.usable():
            self._driver.watch(
                unit,
                raw.stream_recv(array),
                array,
                lambda status, text: self._driver.submit(lambda: opened(status)),
            )

    def _welcome(self, endpoint: UcxEndpoint) -> None:
        endpoint.owns_unit = True
        if endpoint.usable():
            said = self._driver.library.array(BOUND)
            self._driver.watch(endpoint.unit, endpoint.raw.stream_send(said), said, _ignore)
        else:
            self._driver.retire(endpoint.unit)

    # What follows runs in the loop.

    def _admit(self, endpoint: UcxEndpoint) -> None:
        if self._closed or self._endpoint.done() or len(self._unbound) >= MAX_UNBOUND:
            endpoint.close_here()
            return
        loop = asyncio.get_running_loop()
        self._unbound[endpoint] = loop.call_later(OPENING_TIMEOUT_S, self._drop, endpoint)
        endpoint.on_lost(lambda reason: self._drop(endpoint) if endpoint in self._unbound else None)

    def _opened(self, endpoint: UcxEndpoint, opening: bytes, status: int) -> None:
        if endpoint not in self._unbound:
            return  # dropped meanwhile
        if status != STATUS_OK or not self._right(endpoint, opening):
            self._drop(endpoint)
            return
        self._unbound.pop(endpoint).cancel()
        self._driver.submit(lambda: self._welcome(endpoint))
        self._endpoint.set_result(endpoint)
        for stranger in tuple(self._unbound):
            self._drop(stranger)

    def _right(self, endpoint: UcxEndpoint, opening: bytes) -> bool:
        if opening != self._opening:
            logger.warning("refused a data endpoint: it does not know the opening")
            return False
        try:
            endpoint.check_lanes(self._required)
        except TransportRequirementError as error:
            logger.warning("refused a data endpoint: %s", error)
            return False
        return True

    def _drop(self, endpoint: UcxEndpoint) -> None:
        self._unbound.pop(endpoint).cancel()
        endpoint.close_here()


def _ignore(status: int, text: str) -> None:
    """An answer that could not be said shows as a lost endpoint."""
