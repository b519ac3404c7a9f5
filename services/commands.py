"""The commands behind the command line, free of its parsing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.config import load_config
from services.environment import read_environment
from services.log import configure_logging
from services.serve import ReadyService, run_service
from services.terminal import Terminal, open_terminal


def serve_command(flags: Mapping[str, Any], config_file: Path | None) -> None:
    """Serve until interrupted. Raises CommandError."""
    environment = read_environment()
    config = load_config(flags, config_file, environment)
    configure_logging(config.log_level)
    with open_terminal() as terminal:
        for warning in environment.warnings:
            terminal.line(f"warning: {warning}")

        async def work(service: ReadyService) -> None:
            _tell(terminal, service)
            await asyncio.Event().wait()

        run_service(config, environment, terminal, work)


def demo_command(flags: Mapping[str, Any], *, keep: bool) -> None:
    """Chat with a service of its own. Raises CommandError."""
    from services.demo import chat

    environment = read_environment()
    config = load_config({"log_level": "warning", **flags}, None, environment)
    configure_logging(config.log_level)
    with open_terminal() as terminal:

        async def work(service: ReadyService) -> None:
            await asyncio.to_thread(chat, service)
            if keep:
                _tell(terminal, service)
                await asyncio.Event().wait()

        run_service(config, environment, terminal, work)


def doctor_command(port: int) -> int:
    """Print the checks; the exit code says whether all of what is needed is there."""
    from services.doctor import examine, show

    return show(examine(port))


def _tell(terminal: Terminal, service: ReadyService) -> None:
    terminal.line(f"{service.model} is served on {service.url}/v1  (Ctrl-C stops it)")
