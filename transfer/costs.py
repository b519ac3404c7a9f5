"""What moving pages costs beside their bytes: when a gather and a scatter are the cheaper way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Measured facts of a host.

    The defaults are those of shared memory between two CPU processes that share two cores. There
    a message takes 60 us of either event loop and 40 us of either driver thread; blocks of 256 KiB
    are through in about half the time when they are staged, of 512 KiB in the same.
    """

    message_us: float = 150.0
    """One more message beside others under way: both agents, both transports."""
    copy_bytes_per_us: float = 4_000.0
    """One gather or scatter."""
    pass_us: float = 0.0
    """One gather or scatter, whatever its bytes: nothing beside a message on the host."""

    def __post_init__(self) -> None:
        if self.message_us < 0 or self.copy_bytes_per_us <= 0 or self.pass_us < 0:
            raise ValueError(
                "costs: expected a message and a pass of at least 0 us and copies of more than 0 "
                f"bytes/us, got {self}"
            )


def staging_pays(
    messages: int, staged: int, size_bytes: int, passes: int, costs: TransferCosts
) -> bool:
    """Whether ``size_bytes`` bytes are through sooner as ``staged`` gathered messages than as
    ``messages`` messages of their runs.

    ``passes`` is how many of a gather at the sender and a scatter at the receiver are made.
    """
    saved_us = (messages - staged) * costs.message_us
    return saved_us > passes * (staged * costs.pass_us + size_bytes / costs.copy_bytes_per_us)
