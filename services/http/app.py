"""The FastAPI application of a front end."""

from __future__ import annotations

import time

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.http.chat import chat_router
from services.http.completions import completions_router
from services.http.endpoint import ApiContext
from services.http.errors import install_error_handlers
from services.http.health import health_router
from services.http.metrics import HttpMetrics, MetricsMiddleware, metrics_router
from services.http.models import models_router
from services.http.request_id import RequestIdMiddleware
from services.http.settings import HttpSettings
from services.orchestration.api import GenerationService
from services.text.tokenizer import Tokenizer


def create_app(
    service: GenerationService,
    text: Tokenizer,
    settings: HttpSettings,
    *,
    registry: CollectorRegistry,
) -> FastAPI:
    """An application that serves ``service``. Its own metrics join those in ``registry``.

    Starts and stops nothing: service and tokenizer belong to the caller.
    """
    metrics = HttpMetrics(registry)
    context = ApiContext(service, text, settings, metrics)
    app = FastAPI(title="pageferry", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    for router in (
        chat_router(context),
        completions_router(context),
        models_router(service, int(time.time())),
        health_router(service),
        metrics_router(metrics),
    ):
        app.include_router(router)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    app.add_middleware(RequestIdMiddleware)
    return app
