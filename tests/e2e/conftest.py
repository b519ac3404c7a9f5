"""One real service for the session: Ray, a context and a generation worker, SmolLM2, HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from services.default_model import resolve
from services.errors import ModelError
from tests.e2e.client import Client
from tests.support.launched_service import LaunchedService
from tests.support.models import write_tiny_model
from tests.support.requirements import without_model
from worker.model.export_tokenizer import export_tokenizer

SMALL_CACHE = ("--kv-cache-bytes", "1280MiB", "--device", "cpu")


TinyModels = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """By family, a tiny random model and its exported tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")

    @cache
    def make(family: str) -> tuple[Path, Path]:
        model = write_tiny_model(family, directory)
        exported = directory / f"{family}-tokenizer"
        export_tokenizer(model, exported)
        return model, exported

    return make


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """The default model's file; skips where it neither is nor can be fetched (fails under
    ``--require-model``).
    """
    try:
        return resolve()
    except ModelError as error:
        without_model(pytestconfig, str(error))


@pytest.fixture(scope="session")
def service(smollm2: Path) -> Iterator[LaunchedService]:
    """The one Ray cluster of the session. A test that breaks it leaves it ready again."""
    with LaunchedService(smollm2, *SMALL_CACHE) as launched:
        yield launched


@pytest.fixture
def client(service: LaunchedService) -> Iterator[Client]:
    """A client of the service, which is ready."""
    client = Client(service.url)
    client.wait_ready(60)
    yield client
    client.http.close()
