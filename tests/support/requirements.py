"""What a test needs and the machine may lack: a skip, or a failure where the run insists on it."""

from __future__ import annotations

from typing import Final, NoReturn

import pytest

REQUIRE_MODEL: Final = "--require-model"


def without_model(config: pytest.Config, reason: str) -> NoReturn:
    """End a test that cannot have the default model."""
    if config.getoption(REQUIRE_MODEL):
        pytest.fail(f"{REQUIRE_MODEL} was given: {reason}", pytrace=False)
    pytest.skip(reason)
