"""Measures requests as they pass: the one place where their metrics change. Canaries do not
count.
"""

from __future__ import annotations

from typing import assert_never

from services.orchestration.active import ActiveRequest
from services.orchestration.api import (
    Completed,
    Failed,
    InvalidRequest,
    NotReady,
    Overloaded,
    TokenDelta,
)
from services.orchestration.canary import CANARY_ENDPOINT
from services.orchestration.flow_states import LegReport
from services.orchestration.metrics import RequestMetrics


class RequestMeter:
    """Turns what happens to requests into metrics. Times are in the clock of the event loop."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def refused(self, endpoint: str, error: Overloaded | NotReady | InvalidRequest) -> None:
        """A request was not accepted."""
        match error:
            case Overloaded():
                reason = "overloaded"
            case NotReady():
                reason = "not_ready"
            case InvalidRequest():
                reason = error.code
            case _:
                assert_never(error)
        if endpoint != CANARY_ENDPOINT:
            self._metrics.refused.labels(endpoint, reason).inc()

    def accepted(self, active: ActiveRequest) -> None:
        """A request was placed."""
        if active.request.endpoint != CANARY_ENDPOINT:
            self._metrics.in_flight.inc()
            self._metrics.placements.labels(active.placement.reason.value).inc()

    def delta(self, active: ActiveRequest, delta: TokenDelta, now_s: float) -> None:
        """Tokens leave for the reader."""
        endpoint = active.request.endpoint
        if endpoint == CANARY_ENDPOINT:
            return
        if active.first_token_s is None:
            active.first_token_s = now_s
            self._metrics.first_token.labels(endpoint).observe(now_s - active.submitted_s)
        previous_s = active.last_token_s.get(delta.choice)
        active.last_token_s[delta.choice] = now_s
        if previous_s is not None:
            count = len(delta.tokens)
            histogram = self._metrics.inter_token.labels(endpoint)
            for _ in range(count):
                histogram.observe((now_s - previous_s) / count)

    def ended(self, active: ActiveRequest, event: Completed | Failed, now_s: float) -> None:
        """The terminal event leaves."""
        endpoint = active.request.endpoint
        if endpoint == CANARY_ENDPOINT:
            return
        self._metrics.in_flight.dec()
        self._metrics.duration.labels(endpoint).observe(now_s - active.submitted_s)
        match event:
            case Completed():
                self._metrics.requests.labels(endpoint, "completed").inc()
                self._metrics.prompt_tokens.inc(event.prompt_tokens)
                self._metrics.cached_tokens.inc(event.cached_tokens)
                self._metrics.completion_tokens.inc(sum(event.completion_tokens))
            case Failed():
                self._metrics.requests.labels(endpoint, event.code).inc()

    def legs_ended(self, active: ActiveRequest, report: LegReport) -> None:
        """Prompt tokens that were computed where pages should have come, or where there was no
        context leg.
        """
        for ended in report.ended:
            if ended.leg != "generation" or not ended.prefill_tokens:
                continue
            received = ended.request_id == active.request_id and active.disaggregated
            metrics = self._metrics
            counter = (
                metrics.generation_prefill_tokens if received else metrics.local_prefill_tokens
            )
            counter.inc(ended.prefill_tokens)

    def repaired(self, cause: str) -> None:
        """A leg was replaced."""
        self._metrics.repairs.labels(cause).inc()

    def conflict(self) -> None:
        """Two workers disagree about a token."""
        self._metrics.conflicts.inc()
