"""``python -m transfer.ucx.probe``: what UCX does on this host, measured, as one line of JSON.

Two processes on this machine, as two workers would be: the printing one listens, the other one
dials and sends. A process of its own each, because whoever asks (``pageferry doctor``) must not
load UCX itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import time
from typing import Final

import numpy as np

from transfer.outcome import PostStatus
from transfer.transport import (
    OPENING_BYTES,
    Completion,
    Endpoint,
    TransportAddress,
    TransportError,
    main_lane,
)
from transfer.ucx.transport import UcxTransport

MESSAGE_BYTES: Final = 64 << 20
ROUNDS: Final = 7
TIMEOUT_S: Final = 30.0
HOST: Final = "127.0.0.1"
PAGES_TAG: Final = 1
ACKNOWLEDGE_TAG: Final = 2


async def receive_and_print() -> None:
    """Listen, start the sender, receive its messages and print how fast they came."""
    opening = secrets.token_bytes(OPENING_BYTES)
    transport = UcxTransport(HOST)
    await transport.start()
    expectation = await transport.expect(opening)
    address = expectation.address
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "transfer.ucx.probe", str(address.port), opening.hex())
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            endpoint = await expectation.endpoint
            seconds = await _receive(endpoint)
            await sender.wait()
    finally:
        if sender.returncode is None:
            sender.kill()
            await sender.wait()
        await transport.close()
    facts = transport.facts()
    sys.stdout.write(
        json.dumps(
            {
                "version": facts.version,
                "library": facts.library,
                "available": facts.available,
                "lanes": endpoint.lanes,
                "main_lane": main_lane(endpoint.lanes),
                "gb_per_s": MESSAGE_BYTES / statistics.median(seconds) / 1e9,
            }
        )
        + "\n"
    )


async def _receive(endpoint: Endpoint) -> list[float]:
    buffer = np.zeros(MESSAGE_BYTES, dtype=np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        # The empty acknowledgement says that the receive is posted.
        arrived = _posted(endpoint, buffer, PAGES_TAG, receive=True)
        started = time.perf_counter()
        await _posted(endpoint, np.zeros(1, dtype=np.uint8), ACKNOWLEDGE_TAG, receive=False)
        await arrived
        seconds.append(time.perf_counter() - started)
    # A sender that closed after its own last completion would cut off what is on its way.
    await _posted(endpoint, np.zeros(1, dtype=np.uint8), ACKNOWLEDGE_TAG, receive=False)
    return seconds[1:]


async def send(port: int, opening: bytes) -> None:
    """Dial the listener and send when asked."""
    transport = UcxTransport(HOST)
    await transport.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            endpoint = await transport.connect(
                TransportAddress(HOST, port), opening, timeout_s=TIMEOUT_S
            )
            pages = np.ones(MESSAGE_BYTES, dtype=np.uint8)
            asked = np.zeros(1, dtype=np.uint8)
            for _ in range(ROUNDS):
                await _posted(endpoint, asked, ACKNOWLEDGE_TAG, receive=True)
                await _posted(endpoint, pages, PAGES_TAG, receive=False)
            await _posted(endpoint, asked, ACKNOWLEDGE_TAG, receive=True)
    finally:
        await transport.close()


def _posted(endpoint: Endpoint, buffer: object, tag: int, *, receive: bool) -> asyncio.Future[None]:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(completion: Completion) -> None:
        if ended.done():
            return
        if completion.status is PostStatus.DONE:
            ended.set_result(None)
        else:
            ended.set_exception(TransportError(f"{completion.status.value}: {completion.reason}"))

    if receive:
        endpoint.post_receive(buffer, tag, finish)
    else:
        endpoint.post_send(buffer, tag, finish)
    return ended


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(send(int(sys.argv[1]), bytes.fromhex(sys.argv[2])))
    else:
        asyncio.run(receive_and_print())
