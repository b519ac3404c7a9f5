"""A dialler's first bytes, held back until the lanes of its endpoint are those that stay.

Whenever lanes change, UCX sends anew what was posted before; and if one of the new ones cannot be
made, as shared memory of a peer that has just died cannot be attached, it sends over no lane and
the process ends with a segmentation fault. So nothing that is sent is under way until then: that is
this class's invariant. Receives wait for no lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transfer.ucx.driver import Driver
from transfer.ucx.endpoint import UcxEndpoint
from transfer.ucx.lane_watch import LaneWatch


class Opening:
    """Belongs to the driver thread, which calls it after every progress until it is over."""

    def __init__(
        self,
        driver: Driver,
        endpoint: UcxEndpoint,
        said: Any,
        patience_s: float,
        failed: Callable[[str], None],
    ) -> None:
        """``said`` is the array to send, after ``patience_s`` without a change of lanes at last;
        ``failed`` is called in the loop if UCX takes it not.
        """
        self._driver = driver
        self._endpoint = endpoint
        self._said = said
        self._failed = failed
        self._watch = LaneWatch(self._lanes(), time.monotonic(), patience_s)
        self._stay = False

    def __call__(self) -> bool:
        """Whether it is over: said, or the endpoint lost."""
        if not self._endpoint.usable():
            return True
        if self._stay:
            self._say()
            return True
        self._stay = self._watch.stay(self._lanes(), time.monotonic())
        if self._stay:
            # An endpoint whose lanes could not be made fails in the next progress.
            self._driver.submit(_go_round)
        return False

    def _lanes(self) -> object:
        return self._driver.library.lane_devices(self._endpoint.raw)

    def _say(self) -> None:
        library = self._driver.library
        try:
            request = self._endpoint.raw.stream_send(self._said)
        except (library.error, RuntimeError) as error:
            text = f"UCX: {type(error).__name__}: {error}"
            self._driver.deliver(lambda: self._failed(text))
        else:
            self._driver.watch(self._endpoint.unit, request, self._said, _ignore)


def _ignore(status: int, text: str) -> None:
    """An opening that could not be said shows as a lost endpoint."""


def _go_round() -> None:
    """Only the round matters."""
