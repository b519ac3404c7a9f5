"""What every benchmark prints around its figures: commit, machine, versions, command; and
quantiles.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("pageferry", "torch", "triton", "transformers", "ray", "ucxx-cu13")


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by nearest rank; NaN where there is no sample."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        if not ordered:
            return float("nan")
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def surroundings() -> dict[str, Any]:
    """Commit, machine, versions and command of this run."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "commit": git.stdout.strip() or "unknown",
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": versions,
        "command": shlex.join(["python", "-m", *module_and_arguments()]),
    }


def processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def module_and_arguments() -> list[str]:
    """The module name of the running program and its arguments."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return [name, *without_out(sys.argv[1:])]


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments that say what was measured: where the result went is this machine's own."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--out":
            next(rest, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def finish(result: Mapping[str, Any], out: str | None) -> None:
    """Print ``result`` with its surroundings as the one last JSON line; also write it to ``out``
    when given.
    """
    whole = {**result, **surroundings()}
    if out is not None:
        Path(out).write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole), flush=True)
