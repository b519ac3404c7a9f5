"""Logging of a worker process: one line a record, on standard error, never with prompts or tokens.

What pageferry says is shown from INFO on, other libraries' records from WARNING on.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

LINE: Final = "%(asctime)s %(levelname)-7s %(process)d %(name)s: %(message)s"
OURS: Final = ("kvcache_core", "transfer", "worker")


def configure_logging() -> None:
    """Send the records of this process to standard error."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LINE)
    for package in OURS:
        logging.getLogger(package).setLevel(logging.INFO)
