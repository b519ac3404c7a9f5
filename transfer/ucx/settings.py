"""UCX settings that must stand in the environment before the library is loaded.

A value that the user has set is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

DEFAULTS: Final = {
    # Without these, endpoints with error handling silently use TCP even within one host.
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_POSIX_ERROR_HANDLING": "y",
    # A blocking connect() stops the driver thread; and where the peer is gone by the first bytes
    # after it, UCX frees the lane twice, which ends the process.
    "UCX_TCP_CONN_NB": "y",
    # Variables of other UCX users on the machine are not our business.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
CPU_ONLY_DEFAULTS: Final = {
    # Otherwise ucxx asks for fragments in CUDA memory, which needs a driver.
    "UCX_RNDV_FRAG_MEM_TYPE": "host",
}
GPU_DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu_driver() -> bool:
    """Whether a GPU driver's device file is there. Loads nothing."""
    return any(Path(file).exists() for file in GPU_DEVICE_FILES)


def apply(environment: MutableMapping[str, str], *, gpu: bool) -> tuple[str, ...]:
    """Set what the user has not; return the names that were set."""
    wanted = DEFAULTS if gpu else {**DEFAULTS, **CPU_ONLY_DEFAULTS}
    missing = tuple(name for name in wanted if name not in environment)
    for name in missing:
        environment[name] = wanted[name]
    return missing


def apply_to_process() -> tuple[str, ...]:
    """:func:`apply` to this process, for this machine."""
    return apply(os.environ, gpu=has_gpu_driver())


def in_force() -> dict[str, str]:
    """Every UCX setting of this process's environment, for diagnostics."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX")}
