"""What an HTTP endpoint sees of the cluster: submit ids, read events, stop a choice, close.

Invariant: a stream that is read to its end yields, for every choice, tokens in strict index order
without a gap or a repetition, then one :class:`ChoiceFinished`; and as its very last event exactly
one of :class:`Completed` and :class:`Failed`. Text, templates and stop strings are the caller's
business. Loads no torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from worker.messages import SamplingParams, StopRule, WorkerRole
from worker.token_runs import FinishReason, TokenLogprob

__all__ = [
    "ChoiceFinished",
    "Completed",
    "Failed",
    "FinishReason",
    "GenerationRequest",
    "GenerationService",
    "InvalidRequest",
    "ModelLimits",
    "NotReady",
    "OutputEvent",
    "OutputStream",
    "Overloaded",
    "Readiness",
    "SamplingParams",
    "StopRule",
    "TokenDelta",
    "TokenLogprob",
    "WorkerPair",
    "WorkerStatus",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest:
    """One validated and tokenized request. Equality is identity."""

    tokens: npt.NDArray[np.int32]
    """Prompt ids, shape [prompt tokens], never empty. Not written to after submission."""
    scope: bytes
    """Prefix cache scope: model, adapter and cache salt."""
    sampling: SamplingParams
    """With its seed already set, so that a repair draws the same tokens."""
    stop: StopRule
    """``max_tokens`` counts every output token of a choice."""
    deadline_ms: int
    """Milliseconds from submission after which the request ends, whatever happens."""
    n: int = 1
    conversation_id: str | None = None
    """A label of the client that says which requests continue each other. Never a key of anything
    but affinity.
    """
    endpoint: str = "completions"
    """Label of the request in metrics."""


@dataclass(frozen=True)
class TokenDelta:
    """Output tokens ``[index, index + len(tokens))`` of one choice."""

    choice: int
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for every token when the request asked for log-probabilities, else empty."""


@dataclass(frozen=True)
class ChoiceFinished:
    """No more tokens of this choice. A choice that the caller stopped finishes with ``stop``."""

    choice: int
    reason: FinishReason


@dataclass(frozen=True)
class Completed:
    """Terminal event: every choice finished."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache where the prompt was prefilled, or was
    fetched into it; the transfer to where it is decoded does not count.
    """
    completion_tokens: tuple[int, ...]
    """One a choice, up to the index at which the caller stopped it."""
    transferred_bytes: int = 0
    repaired: bool = False


@dataclass(frozen=True)
class Failed:
    """Terminal event: the request ended before every choice finished. Tokens emitted before it are
    valid.
    """

    code: str
    message: str
    http_status: int
    retry_after_s: int | None = None


OutputEvent = TokenDelta | ChoiceFinished | Completed | Failed


class OutputStream(Protocol):
    """Events of one request. Iteration ends after the terminal event, or at once after
    :meth:`aclose`.

    Belongs to one reader in the event loop of the service. It buffers at most what the request may
    produce, so a slow reader costs memory of its own request and delays nobody.
    """

    @property
    def request_id(self) -> str:
        """The id minted for this request, for logs and traces."""

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """The stream itself."""

    async def __anext__(self) -> OutputEvent:
        """The next event. Raises StopAsyncIteration after the terminal one."""

    def stop(self, choice: int, index: int) -> None:
        """End ``choice`` before output index ``index``: later tokens are neither delivered nor
        counted in usage.
        """

    async def aclose(self) -> None:
        """Cancel what still runs and drop what is buffered. Idempotent; to be called in a
        ``finally``.
        """


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against before they are submitted."""

    model: str
    max_sequence_tokens: int
    """Prompt plus output."""
    vocab_size: int
    tokens_per_block: int


@dataclass(frozen=True)
class WorkerPair:
    """One rank that a worker moves pages with, or should."""

    side: Literal["context", "generation"]
    """Of the worker."""
    peer: str
    lane: str
    """Transport that carries the pages; empty while not connected."""
    reason: str
    """Why it is not connected."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker as the front end sees it, for status pages and readiness."""

    instance: str
    incarnation: str
    role: WorkerRole
    state: Literal["connecting", "live", "suspected", "refused", "gone"]
    ready: bool
    reason: str = ""
    transport: str = ""
    kv_dtype: str = ""
    """Element type of the keys and values in its pages."""
    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    transfers_in_flight: int = 0
    staging_bytes: int = 0
    pairs: tuple[WorkerPair, ...] = ()


@dataclass(frozen=True)
class Readiness:
    """Whether a request sent now would be served, with the reasons when not. While it would,
    ``degraded`` tells what is missing all the same: others do its work.
    """

    ready: bool
    reasons: tuple[str, ...]
    workers: tuple[WorkerStatus, ...]
    degraded: tuple[str, ...] = ()


class Overloaded(Exception):
    """Too many requests are in flight; the caller may retry after ``retry_after_s``. HTTP 429."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(Exception):
    """No worker can serve a request at present. HTTP 503."""

    def __init__(self, reasons: tuple[str, ...], retry_after_s: int = 1) -> None:
        super().__init__("; ".join(reasons) or "the cluster is not ready")
        self.reasons = reasons
        self.retry_after_s = retry_after_s


class InvalidRequest(Exception):
    """The request can never be served. HTTP 400 with OpenAI's ``code``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class GenerationService(Protocol):
    """The cluster as endpoints see it; implemented by
    ``services.orchestration.service.Orchestrator``.
    """

    async def submit(self, request: GenerationRequest) -> OutputStream:
        """Accept and start a request. Raises Overloaded, NotReady or InvalidRequest; after it
        returns, the stream ends.
        """

    def limits(self) -> ModelLimits:
        """Limits of the cluster, the smallest of its workers'. Raises NotReady before the first
        worker was seen.
        """

    def readiness(self) -> Readiness:
        """Live lists plus the outcome of the last canary; cheap, no IO."""
