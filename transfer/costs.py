"""What moving pages costs beside their bytes: when a gather and a scatter are the cheaper way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from transfer.staged_cut import staged_messages

PASSES: Final = 2
"""Over every staged byte: a gather at the sender, a scatter at the receiver."""


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

    def __post_init__(self) -> None:
        if self.message_us < 0 or self.copy_bytes_per_us <= 0:
            raise ValueError(
                "costs: expected a message of at least 0 us and copies of more than 0 bytes/us, "
                f"got {self}"
            )


def staging_pays(messages: int, blocks: int, block_bytes: int, costs: TransferCosts) -> bool:
    """Whether ``blocks`` blocks are through sooner gathered than as ``messages`` messages of their
    runs.
    """
    saved_us = (messages - staged_messages(blocks, block_bytes)) * costs.message_us
    return saved_us > PASSES * blocks * block_bytes / costs.copy_bytes_per_us
