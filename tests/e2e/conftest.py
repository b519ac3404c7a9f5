"""One real service for the session: Ray, a context and a generation worker, SmolLM2, HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.default_model import resolve
from services.errors import ModelError
from tests.e2e.client import Client
from tests.support.launched_service import LaunchedService
from tests.support.models import write_tiny_model
from tests.support.oracle import OracleReport, ReferenceModel, check_equal
from tests.support.requirements import without_model
from worker.messages import SamplingParams
from worker.model.export_tokenizer import export_tokenizer
from worker.model.source import locate

SMALL_CACHE = ("--kv-cache-bytes", "1280MiB", "--device", "cpu")


TinyModels = Callable[[str], tuple[Path, Path]]
Judge = Callable[[str, list[int], SamplingParams], OracleReport]


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
def smollm2_reference(smollm2: Path) -> ReferenceModel:
    return ReferenceModel(smollm2)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    """transformers' own."""
    return AutoTokenizer.from_pretrained(**locate(smollm2).arguments())


@pytest.fixture(scope="session")
def smollm2_judge(smollm2_reference: ReferenceModel, smollm2_tokenizer: Any) -> Judge:
    """The oracle's report on an answer to a text."""

    def judge(prompt: str, output: list[int], params: SamplingParams) -> OracleReport:
        ids = smollm2_tokenizer(prompt)["input_ids"]
        return check_equal(smollm2_reference, ids, output, params)

    return judge


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
