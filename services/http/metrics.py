"""What the HTTP edge counts, and the endpoint that shows every metric of the process.

A client's request counts once here, whatever the cluster does to serve it.
"""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HttpMetrics:
    """Counters of one application, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "pageferry_http_requests",
            "Requests answered, by endpoint and status; 499 when the client had gone",
            ("endpoint", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "pageferry_http_in_flight", "Requests being served", registry=registry
        )
        self.client_disconnects = Counter(
            "pageferry_http_client_disconnects",
            "Clients that left before their answer was complete",
            registry=registry,
        )
        self.stream_errors = Counter(
            "pageferry_http_stream_errors",
            "Streams that ended with an error event after status 200",
            registry=registry,
        )


class MetricsMiddleware:
    """Counts requests by route, so that unknown paths cannot grow the metrics."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.in_flight.dec()
            route = scope.get("route")
            endpoint = "unknown" if route is None else route.path
            self._metrics.requests.labels(endpoint, str(status)).inc()


def metrics_router(metrics: HttpMetrics) -> APIRouter:
    """``GET /metrics``."""
    router = APIRouter()

    @router.get("/metrics")
    async def show(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"content-type": content_type})

    return router
