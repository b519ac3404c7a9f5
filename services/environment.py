"""The one file of the services that reads environment variables.

Arguments and the configuration file win over the environment. A ``PAGEFERRY_`` name that does not
exist is reported with the nearest one that does: a mistyped variable must not be silently without
effect.
"""

from __future__ import annotations

import difflib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "PAGEFERRY_"
CLUSTER_TOKEN: Final = "PAGEFERRY_CLUSTER_TOKEN"
ROLE: Final = "PAGEFERRY_ROLE"
"""Set for every worker by the launcher, replacing any inherited value."""
DEMOTION_VARIABLES: Final = {
    "PAGEFERRY_CTX_DEMOTE_UNCACHED_TOKENS": "ctx_demote_uncached_tokens",
    "PAGEFERRY_CTX_DEMOTE_MAX_ITERS": "ctx_demote_max_iters",
}
"""Settings of the scheduler, with the keys of the configuration that win over them."""
FORWARDED: Final = (
    "PAGEFERRY_SHARED_DRAFT_KV",
    "PAGEFERRY_DRAFT_KV_TOKENS_PER_BLOCK",
    *DEMOTION_VARIABLES,
    "PAGEFERRY_COORDINATOR_RESERVATION_TIMEOUT",
    "THP_MEM_ALLOC_ENABLE",
)
"""Settings of workers and coordinators; handed on as they are, also to workers on other
machines."""
KNOWN: Final = (CLUSTER_TOKEN, ROLE, *FORWARDED)

RAY_VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Our runtime environment is explicit; `uv run` must not send a copy of the project along.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # Workers serve; Ray would run them at niceness 15, behind every other process.
    "RAY_worker_niceness": "0",
    # CUDA_VISIBLE_DEVICES of workers without a GPU is our business.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Must be in the environment before ray is imported."""
JOINED_RAY_VARIABLES: Final = {
    **RAY_VARIABLES,
    # An attempt at a silent address takes 40 s; the default of 20 attempts is no deadline.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
}
"""The same for a Ray that somebody else runs."""
PRIVATE_RAY_VARIABLES: Final = {
    **RAY_VARIABLES,
    # Unless it thinks that one machine is all there can be, Ray takes an address of the network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The pools of a worker have a fixed size; Ray's monitor would kill workers for the page cache.
    "RAY_memory_monitor_refresh_ms": "0",
}


def private_ray_variables() -> dict[str, str]:
    """The same for a Ray of our own on this machine, with a secret that nobody else knows."""
    return {
        **PRIVATE_RAY_VARIABLES,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the process environment says."""

    cluster_token: str | None
    cache_directory: Path
    """Per-user cache of this program; may not exist yet."""
    forwarded: Mapping[str, str]
    warnings: tuple[str, ...]


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read ``variables``, by default the environment of this process."""
    values = os.environ if variables is None else variables
    return Environment(
        cluster_token=values.get(CLUSTER_TOKEN) or None,
        cache_directory=_cache_directory(values),
        forwarded={name: values[name] for name in FORWARDED if name in values},
        warnings=tuple(
            _unknown(name)
            for name in sorted(values)
            if name.startswith(PREFIX) and name not in KNOWN
        ),
    )


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child process: that of this one with ``changes``."""
    return {**os.environ, **changes}


def apply_environment(changes: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them when they are imported."""
    os.environ.update(changes)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; the known names are {', '.join(KNOWN)}"
    return f"environment variable {name} has no effect{hint}"


def _cache_directory(values: Mapping[str, str]) -> Path:
    configured = values.get("XDG_CACHE_HOME")
    if configured and os.path.isabs(configured):
        return Path(configured) / "pageferry"
    home = Path(values.get("HOME") or Path.home())
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "pageferry"
    return home / ".cache" / "pageferry"
