"""The command line as a process: exit codes, one-line errors, and what it does not import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import serve, with_optional_counts
from services.config import ServeConfig


def pageferry(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=cwd,
    )


def test_version() -> None:
    result = pageferry("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("pageferry 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("serve", "/no/such/model", "--port", "0"), 1, "a path that does not exist"),
        (("serve", "--port", "70000"), 2, "port: "),
        (("serve", "--aggregated", "--context", "2"), 2, "aggregated excludes"),
        (("serve", "--config", "/no/such/file.yaml"), 2, "cannot be read"),
        (("serve", "--kv-cache-bytes", "lots"), 2, "expected a size such as 512MiB"),
        (("serve", "--no-such-option"), 2, "No such option"),
        (("demo", "/no/such/model"), 1, "a path that does not exist"),
    ],
)
def test_user_errors_are_one_message_without_a_traceback(
    arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = pageferry(*arguments)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = pageferry("serve", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot bind 127.0.0.1:" in result.stderr
    assert "choose another --port" in result.stderr


def test_unknown_keys_of_the_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("contxt: 2\n")
    result = pageferry("serve", "--config", "cluster.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "unknown key 'contxt', did you mean 'context'?" in result.stderr


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys, services.cli\n"
        "heavy = {'torch', 'ray', 'transformers', 'ucxx', 'numpy', 'pydantic', 'fastapi', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["serve", "--aggregated"], ["serve", "--aggregated=1"]),
        (["serve", "--aggregated", "2"], ["serve", "--aggregated", "2"]),
        (["serve", "--aggregated", "--port", "1"], ["serve", "--aggregated=1", "--port", "1"]),
        (["serve", "--aggregated", "model"], ["serve", "--aggregated=1", "model"]),
        (["serve", "--aggregated=3"], ["serve", "--aggregated=3"]),
    ],
)
def test_aggregated_needs_no_number(given: list[str], seen: list[str]) -> None:
    assert with_optional_counts(given) == seen


def test_every_option_is_a_key_of_the_configuration_and_the_other_way_round() -> None:
    options = set(inspect.signature(serve).parameters) - {"config"}
    # The secret of the cluster is no option: other users of the machine can see command lines.
    assert options == set(ServeConfig.model_fields) - {"cluster_token"}
