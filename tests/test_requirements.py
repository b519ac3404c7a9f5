"""A run that insists on the model cannot be green without it."""

from __future__ import annotations

import pytest

from tests.support.requirements import without_model


@pytest.mark.parametrize(
    ("required", "outcome"), [(True, pytest.fail.Exception), (False, pytest.skip.Exception)]
)
def test_a_missing_model_is_a_skip_or_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    outcome: type[Exception],
    *,
    required: bool,
) -> None:
    monkeypatch.setattr(pytestconfig.option, "require_model", required)
    with pytest.raises(outcome, match="no network"):
        without_model(pytestconfig, "no network")
