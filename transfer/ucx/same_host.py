"""Whether an address is one of this host's."""

from __future__ import annotations

import socket
from typing import Final

ANY_PORT: Final = 9
"""Nothing is sent there."""


def is_here(host: str) -> bool:
    """Whether what is sent to ``host`` stays on this host; False where that cannot be told.

    A container with a network of its own is another host here, even where its memory is shared.
    """
    try:
        found = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(
    family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
) -> bool:
    # The kernel gives a socket to an address of its own host that same address.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False
