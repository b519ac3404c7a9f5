"""How a device's memory is divided, as arithmetic over readings: pages, what a step and transfers
need beside them, and what torch leaves to others.

    before the pools   | used              | KV cache | step | transfers | rest |
    after them         | reserved by torch            | free ................. |
                       | cap of torch = reserved + free - margin    | margin   |

    KV cache = fraction * (free before the pools - step - transfers)

The KV cache does not depend on the margin, and the default margin takes nothing that a step or a
transfer is known to need. All values are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MARGIN_BYTES: Final = 1 << 30
"""What torch leaves to collectives, UCX and the driver where there is as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """A device at one moment, with nothing cached that torch could give back."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    """Of torch in this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """What is needed beside weights and pages."""

    step_bytes: int = 0
    """Most that a step takes while it runs; 0 where it was not measured."""
    staging_bytes: int = 0
    """Most that staging buffers of transfers take."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.step_bytes + self.staging_bytes


def cache_quota(free_bytes: int, needs: MemoryNeeds, fraction: float) -> int:
    """Bytes for the KV cache: ``fraction`` of what is free beside ``needs``; 0 where nothing is."""
    return int(max(0, free_bytes - needs.bytes) * fraction)


def default_margin(free_bytes: int, needs: MemoryNeeds) -> int:
    """MARGIN_BYTES, or half of what nothing is known to need where that is less: always below
    ``free_bytes`` unless nothing is free.
    """
    return min(MARGIN_BYTES, max(0, free_bytes - needs.bytes) // 2)


def torch_cap(reading: MemoryReading, needs: MemoryNeeds, margin_bytes: int | None) -> int:
    """Most that torch may reserve from now on; ``margin_bytes`` None takes the default.

    Raises:
        ValueError: the declared margin is not below what is free.
    """
    free = reading.free_bytes
    if margin_bytes is None:
        margin_bytes = default_margin(free, needs)
    elif margin_bytes >= free:
        raise ValueError(
            f"torch_mem_safety_margin: expected less than the {free} bytes that are free beside "
            f"weights and KV cache, got {margin_bytes}; lower it or the KV cache"
        )
    return reading.reserved_bytes + free - margin_bytes
