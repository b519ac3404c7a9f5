"""The physical limit: plain messages between two processes over UCX endpoints of their own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from transfer.outcome import PostStatus
from transfer.transport import (
    OPENING_BYTES,
    Completion,
    Ended,
    Endpoint,
    Expectation,
    PostedRequest,
    TransportAddress,
    TransportError,
)
from transfer.ucx.transport import UcxTransport

ASK_TAG: Final = 1 << 32
"""Above the tags of the messages: their numbers."""
TIMEOUT_S: Final = 60.0
RegionsOf = Callable[[int, int], Sequence[object]]
"""Memory of so many messages, each this rank's share of a prompt of so many blocks."""
Post = Callable[[object, int, Ended], PostedRequest]


class RawSender:
    """Sends what is asked of one receiver."""

    def __init__(self, expectation: Expectation, opening: bytes) -> None:
        self._expectation = expectation
        self._opening = opening

    @classmethod
    async def expect(cls, transport: UcxTransport) -> RawSender:
        """Listen for one receiver."""
        opening = secrets.token_bytes(OPENING_BYTES)
        return cls(await transport.expect(opening), opening)

    @property
    def address(self) -> dict[str, Any]:
        """Where the receiver is to dial."""
        return {"port": self._expectation.address.port, "opening": self._opening.hex()}

    async def serve(self, regions: RegionsOf) -> None:
        """Answer until the receiver asks for nothing."""
        endpoint = await self._expectation.endpoint
        asked = np.zeros(2, dtype=np.int64)
        while True:
            await posted(endpoint.post_receive, asked, ASK_TAG)
            if not asked[0]:
                return
            regions_now = regions(int(asked[0]), int(asked[1]))
            await asyncio.gather(
                *(posted(endpoint.post_send, part, tag) for tag, part in enumerate(regions_now))
            )


class RawReceiver:
    """Asks one sender for messages."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @classmethod
    async def dial(
        cls, transport: UcxTransport, host: str, address: Mapping[str, Any]
    ) -> RawReceiver:
        """Connect to a :class:`RawSender`."""
        where = TransportAddress(host, address["port"])
        opening = bytes.fromhex(address["opening"])
        return cls(await transport.connect(where, opening, timeout_s=TIMEOUT_S))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Transports in use."""
        return self._endpoint.lanes

    async def fetch(self, blocks: int, regions: Sequence[object]) -> None:
        """Receive a message into each region; ``blocks`` tells the sender how large they are."""
        arrived = [
            posted(self._endpoint.post_receive, region, tag) for tag, region in enumerate(regions)
        ]
        await self._ask(len(regions), blocks)
        await asyncio.gather(*arrived)

    async def end(self) -> None:
        """Ask for nothing more."""
        await self._ask(0, 0)

    async def _ask(self, messages: int, blocks: int) -> None:
        word = np.array([messages, blocks], dtype=np.int64)
        await posted(self._endpoint.post_send, word, ASK_TAG)


def posted(post: Post, buffer: object, tag: int) -> asyncio.Future[None]:
    """Done when the request has ended well."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(completion: Completion) -> None:
        if completion.status is PostStatus.DONE:
            ended.set_result(None)
        else:
            ended.set_exception(TransportError(completion.reason))

    post(buffer, tag, finish)
    return ended
