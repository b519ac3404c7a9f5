"""The served model, as ``/v1/models`` lists it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from services.http.answers import Json
from services.http.errors import json_response, model_not_found
from services.orchestration.api import GenerationService, ModelLimits


def models_router(service: GenerationService, created: int) -> APIRouter:
    """``GET /v1/models`` and ``GET /v1/models/{model}``; ``created`` in Unix seconds."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_card(service.limits(), created)]})

    @router.get("/v1/models/{model:path}")
    async def show_model(model: str) -> Response:
        limits = service.limits()
        if model != limits.model:
            raise model_not_found(model, limits.model)
        return json_response(_card(limits, created))

    return router


def _card(limits: ModelLimits, created: int) -> Json:
    return {
        "id": limits.model,
        "object": "model",
        "created": created,
        "owned_by": "pageferry",
        "max_model_len": limits.max_sequence_tokens,
    }
