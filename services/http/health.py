"""Liveness and readiness.

``/health`` says that this front end answers; ``/ready`` that a request sent now would be served,
and else why not. A service of which a part is away is ready while the rest serves; the reasons and
``degraded`` name the part.
"""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import Response

from services.http.errors import json_response
from services.orchestration.api import GenerationService


def health_router(service: GenerationService) -> APIRouter:
    """``GET`` and ``HEAD`` of ``/health`` and ``/ready``."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        readiness = service.readiness()
        content = {
            "ready": readiness.ready,
            "reasons": [*readiness.reasons, *readiness.degraded],
            "degraded": list(readiness.degraded),
            "workers": [asdict(worker) for worker in readiness.workers],
        }
        if readiness.ready:
            return json_response(content)
        return json_response(content, status=503, headers={"retry-after": "1"})

    return router
