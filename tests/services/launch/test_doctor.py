"""The doctor: what it says of this machine, and how it says that something is wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.doctor import Check, Status, check_port, examine, probe, show


@pytest.fixture(scope="module")
def checks() -> dict[str, Check]:
    return {check.name: check for check in examine(0)}


@pytest.mark.ucx
def test_measures_the_transport_between_two_processes(checks: dict[str, Check]) -> None:
    transfer = checks["transfer"]
    assert transfer.status is not Status.BAD, transfer.found
    assert "GB/s" in transfer.found
    assert "libucp" in transfer.found


@pytest.mark.ucx
def test_finds_what_the_service_needs(checks: dict[str, Check]) -> None:
    for name in ("python", "torch", "transformers", "ray", "ucxx", "devices", "cache folder"):
        assert checks[name].status is Status.GOOD, checks[name]


def test_a_port_in_use_is_a_warning_with_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = check_port(taken.getsockname()[1])
    assert check.status is Status.WARNING
    assert "another --port" in check.advice


def test_a_probe_that_fails_says_its_last_words() -> None:
    answer, error = probe("services.no_such_module")
    assert answer is None
    assert "no_such_module" in error


@pytest.mark.parametrize(
    ("status", "code"), [(Status.GOOD, 0), (Status.WARNING, 0), (Status.BAD, 1)]
)
def test_exit_code_and_advice(
    status: Status, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check = Check(name="thing", status=status, found="this [here]", advice="do that")
    assert show(iter([check])) == code
    shown = capsys.readouterr().out
    assert "this [here]" in shown
    assert "do that" in shown
