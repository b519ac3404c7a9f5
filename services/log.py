"""Logging of the services: one line a record, on standard error, never with prompts, tokens or
secrets."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from typing_extensions import override

from worker.log import LINE


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that moment: a live display may stand in for it."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str) -> None:
    """Send the records of this process to standard error in one format."""
    handler = StandardErrorHandler()
    handler.setFormatter(logging.Formatter(LINE))
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # One line a request is the business of the metrics, not of the log.
    for chatty in ("httpx", "httpcore", "asyncio", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
