"""One UCX endpoint as the loop sees it, and the requests posted on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from transfer.outcome import PostStatus
from transfer.transport import (
    Completion,
    Ended,
    Endpoint,
    Lost,
    PostedRequest,
    check_requirement,
    check_tag,
    remote_access,
)
from transfer.ucx.driver import Driver, Unit
from transfer.ucx.library import STATUS_CANCELED, STATUS_OK


class UcxRequest(PostedRequest):
    """A send or receive. ``raw`` belongs to the driver thread, None before posting and after."""

    def __init__(self, endpoint: UcxEndpoint, ended: Ended) -> None:
        self._endpoint = endpoint
        self._ended_callback = ended
        self._ended = False
        self.cancel_wanted = False
        self.raw: Any = None

    @property
    @override
    def ended(self) -> bool:
        return self._ended

    @override
    def cancel(self) -> None:
        if not self._ended and not self.cancel_wanted:
            self.cancel_wanted = True
            self._endpoint.cancel_request(self)

    def forget_raw(self) -> None:
        """Driver thread: the ucxx object is dropped where it was made."""
        self.raw = None

    def finish(self, completion: Completion) -> None:
        """Called once, in the loop."""
        self._ended = True
        self._ended_callback(completion)


class UcxEndpoint(Endpoint):
    """Made in the driver thread around a fresh ``UCXEndpoint``; ``raw`` belongs to that thread."""

    def __init__(self, driver: Driver, unit: Unit, raw: Any) -> None:
        self._driver = driver
        self.unit = unit
        self.owns_unit = False
        """Driver thread: the unit serves this endpoint's peer and ends with it."""
        self.raw: Any = raw
        self.failed_raw = False
        """Driver thread: UCX reported the endpoint in error."""
        self._lanes: tuple[str, ...] = ()
        self._lost: list[Lost] = []
        self._lost_reason = ""
        self._alive = True
        self.closing = False
        raw.set_close_callback(self._closed_in_driver)
        unit.open.append(self)

    @property
    @override
    def alive(self) -> bool:
        return self._alive

    @property
    @override
    def lanes(self) -> tuple[str, ...]:
        return self._lanes

    @override
    def on_lost(self, lost: Lost) -> None:
        if self._lost_reason:
            asyncio.get_running_loop().call_soon(lost, self._lost_reason)
        else:
            self._lost.append(lost)

    @override
    def post_send(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        return self._submit(buffer, tag, ended, lambda raw: raw.tag_send)

    @override
    def post_receive(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        return self._submit(buffer, tag, ended, lambda raw: raw.tag_recv)

    def cancel_request(self, request: UcxRequest) -> None:
        """Ask UCX to cancel; a request that UCX has matched runs on."""
        self._driver.submit(lambda: self._cancel(request))

    def close_here(self) -> None:
        """Mark closed by this side and close in the driver thread. Idempotent."""
        if self.closing:
            return
        self.closing = True
        self._alive = False
        self._driver.submit(self.close_raw)

    def check_lanes(self, required: str | None) -> None:
        """Raise TransportRequirementError when the pair does not use the required transport."""
        check_requirement(required, self._lanes, "connection to a peer")

    def _submit(
        self, buffer: object, tag: int, ended: Ended, verb: Callable[[Any], Any]
    ) -> PostedRequest:
        array = self._array(buffer)
        check_tag(tag)
        request = UcxRequest(self, ended)
        self._driver.submit(lambda: self._post(request, array, verb, tag))
        return request

    def _array(self, buffer: object) -> Any:
        array = self._driver.library.array(buffer)
        if not array.c_contiguous:
            raise ValueError(
                f"transfer buffer: expected C-contiguous memory, got shape {array.shape} strides "
                f"{array.strides}; send whole slots"
            )
        return array

    # What follows runs in the driver thread.

    def query_lanes(self) -> None:
        """Learn which transports the connected endpoint uses."""
        if self.usable():
            self._lanes = self._driver.library.lanes(self.raw)
            self.unit.copies = not remote_access(self._lanes)

    def usable(self) -> bool:
        """Whether requests may be posted: ucxx posts those of a dead endpoint on the worker."""
        return self.raw is not None and not self.failed_raw and bool(self.raw.alive)

    def close_raw(self) -> None:
        """Close without waiting for the peer and drop the UCX object."""
        raw, self.raw = self.raw, None
        if raw is not None:
            self.unit.open.remove(self)
            self._driver.close(self.unit, raw)
        if self.owns_unit:
            self._driver.retire(self.unit)

    def _post(self, request: UcxRequest, array: Any, verb: Callable[[Any], Any], tag: int) -> None:
        if request.cancel_wanted:
            self._end_unposted(request, "cancelled before it was posted")
            return
        if not self.usable():
            self._end_unposted(request, "endpoint was already closed")
            return
        library = self._driver.library
        try:
            request.raw = verb(self.raw)(array, library.tag(tag))
        except (library.error, ValueError, OverflowError) as error:
            # A kind of memory that UCX does not take must not end the thread.
            self._end_unposted(request, f"{type(error).__name__}: {error}")
            return
        self._driver.watch(
            self.unit,
            request.raw,
            array,
            lambda status, text: request.finish(self._completion(request, status, text)),
            request.forget_raw,
        )

    def _end_unposted(self, request: UcxRequest, reason: str) -> None:
        completion = Completion(PostStatus.REVOKED, reason)
        self._driver.deliver(lambda: request.finish(completion))

    def _cancel(self, request: UcxRequest) -> None:
        if request.raw is not None and not request.raw.completed:
            self._driver.library.cancel(request.raw)

    def _closed_in_driver(self) -> None:
        # From inside UCX's progress: nothing may be called on the endpoint here.
        self.failed_raw = True
        self._driver.submit(self.close_raw)
        self._driver.deliver(self._lost_in_loop)

    # What follows runs in the loop.

    def _completion(self, request: UcxRequest, status: int, text: str) -> Completion:
        if status == STATUS_OK:
            return Completion(PostStatus.DONE)
        withdrawn = status == STATUS_CANCELED and request.cancel_wanted and self._alive
        if withdrawn or not remote_access(self._lanes):
            return Completion(PostStatus.REVOKED, text)
        return Completion(PostStatus.LOST, text)

    def _lost_in_loop(self) -> None:
        if self._lost_reason:
            return
        self._lost_reason = (
            "closed here" if self.closing else "the peer closed the endpoint or died"
        )
        self._alive = False
        callbacks, self._lost = self._lost, []
        for lost in callbacks:
            lost(self._lost_reason)
