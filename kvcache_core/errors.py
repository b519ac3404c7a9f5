"""Errors of the KV cache that are bugs, not user mistakes."""

from __future__ import annotations


class InvariantViolation(RuntimeError):
    """The cache's own bookkeeping contradicts itself. Never caught inside the package: state is
    suspect.
    """


def invariant(holds: object, message: str) -> None:
    """Raise InvariantViolation with ``message`` unless ``holds``."""
    if not holds:
        raise InvariantViolation(message)
