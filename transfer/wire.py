"""Frames and message types of every socket in the system.

A frame is ``magic(2) version(2) length(4) body``. The version is compared before the body is
decoded, so a peer that speaks another protocol is refused with both numbers and never half
understood. A body is msgpack of one frozen message type, told by its ``kind``. Arrays travel as
packed little-endian int32 bytes, never as lists: a list of 8,192 page ids costs about a hundred
times as much to encode.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

# 1: first version. 2: runs of a chunk say whether they pass through staging. 3: a grant says how
# many ranks grant a request, and only the leader's handoff has data; prefix pulls. 4: front ends
# name context workers to generation workers (Warm); pairs and rates in the gauges. 5: whoever dials
# says whom it means to reach. 6: a leader's address tells of its followers. 7: a step's tokens are
# columns. 8: a worker's welcome says what its pages hold.
PROTOCOL_VERSION: Final = 8
MAGIC: Final = b"PF"
HEADER: Final = struct.Struct("<2sHI")
MAX_FRAME_BYTES: Final = 64 << 20

MessageT = TypeVar("MessageT")


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol, or a body that is no message of the expected
    union.
    """


class Message(BaseModel):
    """Base of every wire message: immutable, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def pack_ints(values: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Pack ints as little-endian int32. Raises OverflowError for values outside int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes) -> npt.NDArray[np.int32]:
    """Inverse of :func:`pack_ints`; a read-only array that shares ``data``. Raises FrameError on a
    ragged length.
    """
    if len(data) % 4:
        raise FrameError(f"packed int32 array: expected a multiple of 4 bytes, got {len(data)}")
    return np.frombuffer(data, dtype="<i4")


class Codec(Generic[MessageT]):
    """Encodes and decodes one union of messages, discriminated by ``kind``."""

    def __init__(self, union: Any) -> None:
        self._adapter: TypeAdapter[MessageT] = TypeAdapter(union)

    def encode(self, message: MessageT) -> bytes:
        """One whole frame."""
        body: bytes = msgpack.packb(self._adapter.dump_python(message), use_bin_type=True)
        if len(body) > MAX_FRAME_BYTES:
            raise FrameError(f"frame body of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
        return HEADER.pack(MAGIC, PROTOCOL_VERSION, len(body)) + body

    def decode_body(self, body: bytes) -> MessageT:
        """Decode a body whose header was already checked. Raises FrameError for anything that is
        not a message.
        """
        try:
            value = msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
            return self._adapter.validate_python(value)
        except (
            ValidationError,
            ValueError,
            TypeError,
            RecursionError,
            msgpack.UnpackException,
        ) as error:
            raise FrameError(f"undecodable message body of {len(body)} bytes: {error}") from error

    def decode(self, frame: bytes) -> MessageT:
        """Decode one whole frame."""
        length = body_length(frame[: HEADER.size])
        if len(frame) != HEADER.size + length:
            raise FrameError(f"frame: expected {HEADER.size + length} bytes, got {len(frame)}")
        return self.decode_body(frame[HEADER.size :])

    async def read(self, reader: asyncio.StreamReader) -> MessageT:
        """Read one message. Raises FrameError, or asyncio.IncompleteReadError when the peer is
        gone.
        """
        length = body_length(await reader.readexactly(HEADER.size))
        return self.decode_body(await reader.readexactly(length))

    def write(self, writer: asyncio.StreamWriter, messages: Iterable[MessageT]) -> None:
        """Queue messages on ``writer`` without waiting; the caller bounds the buffer."""
        queue_frames(writer, b"".join(self.encode(message) for message in messages))


def queue_frames(writer: asyncio.StreamWriter, frames: bytes) -> None:
    """Queue encoded messages; a connection that is closed takes none, and its reader learns of the
    end. Between the two asyncio drops what is written, where uvloop raises RuntimeError.
    """
    if not writer.is_closing():
        writer.write(frames)


def body_length(header: bytes) -> int:
    """Length announced by a header whose magic, version and size are right; else FrameError."""
    if len(header) != HEADER.size:
        raise FrameError(f"frame header: expected {HEADER.size} bytes, got {len(header)}")
    magic, version, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(
            f"frame magic: expected {MAGIC!r}, got {magic!r}; the peer speaks something else"
        )
    if version != PROTOCOL_VERSION:
        raise FrameError(
            f"protocol version: ours is {PROTOCOL_VERSION}, the peer's is {version}; "
            "run one release on both"
        )
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame body of {length} bytes announced; the limit is {MAX_FRAME_BYTES}")
    return int(length)
