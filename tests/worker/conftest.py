"""Models shared by the worker's tests, made or loaded once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import real_model_path, write_tiny_model
from tests.support.oracle import load_reference
from tests.support.requirements import without_model
from tests.support.triton_interpreter import speed_up

speed_up()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny random model of a family."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def path(family: str) -> Path:
        return write_tiny_model(family, directory)

    return path


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """transformers' own float32 model with its own attention."""

    return cache(load_reference)


@pytest.fixture(scope="session")
def real_model(pytestconfig: pytest.Config) -> Path:
    """The small real model, or a skip (a failure under ``--require-model``) that says how to get
    it.
    """
    path = real_model_path()
    if path is None:
        reason = "the default model is not on this machine: `pageferry demo` fetches it"
        without_model(pytestconfig, reason)
    return path
