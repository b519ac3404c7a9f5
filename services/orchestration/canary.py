"""A tiny request through real workers, so that readiness is proved and not assumed.

It runs when the set of workers changes, when nothing else has succeeded for a while, and again soon
after a failure. Any request that completes counts as a success, so a busy cluster is not probed.
A canary that waits its turn behind other work proves nothing while the workers move; it fails when
a worker that has work does not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from services.orchestration.api import (
    Completed,
    Failed,
    GenerationRequest,
    InvalidRequest,
    NotReady,
    OutputStream,
    Overloaded,
)
from worker.messages import SamplingParams, StopRule

CANARY_ENDPOINT: Final = "canary"
CANARY_SCOPE: Final = b"pageferry canary"
CANARY_PROMPT_TOKENS: Final = 16
LOOKS_PER_TIMEOUT: Final = 4


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Seconds."""

    idle_s: float = 30.0
    """Without any completed request for this long, a canary runs."""
    retry_s: float = 1.0
    timeout_s: float = 10.0
    """Without any progress of a worker that has work for this long, it fails."""
    patience_s: float = 300.0
    """A canary that has waited this long among moving workers is taken back."""


class CanaryTarget(Protocol):
    """What the canary needs of the service."""

    def missing(self) -> tuple[str, ...]:
        """Why no request can be served; empty when one can."""

    def stalled(self, request_id: str, since_s: float) -> tuple[str, ...]:
        """What has had work since ``since_s``, this request's or another's, and did not move."""

    def vocab_size(self) -> int:
        """Of the model."""

    async def submit(self, request: GenerationRequest) -> OutputStream:
        """As for any request."""


class Canary:
    """The latest proof that requests are served."""

    def __init__(self, target: CanaryTarget, settings: CanarySettings) -> None:
        self._target = target
        self._settings = settings
        self._wake = asyncio.Event()
        self._last_success_s: float | None = None
        self._failure = "no request has been served yet"
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        """Why the cluster is not trusted; empty when the last proof succeeded."""
        return self._failure

    def start(self) -> None:
        """Probe in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="canary")

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def served(self, now_s: float) -> None:
        """A request completed."""
        self._last_success_s = now_s
        self._failure = ""

    def workers_changed(self) -> None:
        """Probe soon: the last proof was about other workers."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._settings.idle_s
            if not self._target.missing():
                await self._probe()
                if self._failure:
                    wait_s = self._settings.retry_s
            try:
                # Not wait_for, which loses a cancellation that comes together with the wake.
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                await self._until_idle()

    async def _until_idle(self) -> None:
        """Return once nothing has been served for ``idle_s``, or at once after a failure or a
        change.
        """
        loop = asyncio.get_running_loop()
        while not self._failure and self._last_success_s is not None and not self._wake.is_set():
            rest_s = self._last_success_s + self._settings.idle_s - loop.time()
            if rest_s <= 0:
                return
            await asyncio.sleep(rest_s)

    async def _probe(self) -> None:
        started_s = asyncio.get_running_loop().time()
        failure = await self._request()
        served_meanwhile = self._last_success_s is not None and self._last_success_s >= started_s
        if failure is None:
            return
        if not failure:
            self.served(asyncio.get_running_loop().time())
        elif not served_meanwhile:
            self._failure = f"the canary request failed: {failure}"

    async def _request(self) -> str | None:
        """Why the request failed, empty when it did not, None when it proves nothing."""
        size = min(CANARY_PROMPT_TOKENS, self._target.vocab_size())
        request = GenerationRequest(
            tokens=np.arange(size, dtype=np.int32),
            scope=CANARY_SCOPE,
            sampling=SamplingParams(temperature=0.0),
            stop=StopRule(max_tokens=2),
            deadline_ms=int((self._settings.patience_s + self._settings.timeout_s) * 1000),
            endpoint=CANARY_ENDPOINT,
        )
        try:
            stream = await self._target.submit(request)
        except Overloaded:
            return None
        except (NotReady, InvalidRequest) as error:
            return str(error)
        # Its end and its stall are waited for together. Closing the stream cancels the legs, which
        # is no failure on any worker.
        end = asyncio.get_running_loop().create_task(_end_of(stream), name="canary answer")
        try:
            return await self._outcome(stream.request_id, end)
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
            await stream.aclose()

    async def _outcome(self, request_id: str, end: asyncio.Task[str]) -> str | None:
        loop = asyncio.get_running_loop()
        timeout_s = self._settings.timeout_s
        give_up_s = loop.time() + self._settings.patience_s
        while loop.time() < give_up_s:
            await asyncio.wait({end}, timeout=timeout_s / LOOKS_PER_TIMEOUT)
            if end.done():
                return end.result()
            stalled = self._target.stalled(request_id, loop.time() - timeout_s)
            if stalled:
                return f"{'; '.join(stalled)} for {timeout_s:g} s"
        return None


async def _end_of(stream: OutputStream) -> str:
    """Why the request failed, empty when it completed."""
    async for event in stream:
        match event:
            case Completed():
                return ""
            case Failed():
                return f"{event.code}: {event.message}"
            case _:
                pass
    return "it ended without a terminal event"
