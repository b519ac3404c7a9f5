"""Errors that end a command with one clear line instead of a traceback.

Everything a user can cause (a wrong flag, a missing model, a port in use, no network) is a
:class:`CommandError`; any other exception that reaches the command line is a bug and keeps its
traceback.
"""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


class CommandError(Exception):
    """A failure with an explanation for the user and the exit code of the process."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(CommandError):
    """A flag, configuration file or environment variable that cannot be used as given."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


class ModelError(CommandError):
    """The model to serve cannot be found, fetched or read."""


class StartError(CommandError):
    """A part of the service did not come up."""


class HostLostError(StartError):
    """What starts processes is gone itself: no start can succeed any more."""
