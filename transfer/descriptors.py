"""File descriptors of this process: each peer takes some, and the usual limit of 1,024 ends at 60.

UCX ends the whole process where it runs out of them while it makes a worker. So processes that
serve take all that the system allows, and a peer that would take the last ones is refused.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from transfer.transport import TransportError

PEER_DESCRIPTORS: Final = 64
"""Left before a peer is taken on: over shared memory and TCP it keeps 17, while it is made it takes
some more, and whoever connects meanwhile takes one.
"""


def raise_limit() -> None:
    """Allow this process as many as the system does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_left(wanted: int) -> None:
    """Raise TransportError where fewer than ``wanted`` are left."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and limit - used < wanted:
        raise TransportError(
            f"{used} of {limit} file descriptors are in use, and one more peer may take {wanted}; "
            "raise the limit (ulimit -n)"
        )
