"""Frames between launcher and front end."""

from __future__ import annotations

import asyncio

import pytest

from services.membership import LAUNCHER_CODEC, FrontEndSettings, MembershipUpdate
from transfer.identity import Incarnation
from transfer.wire import FrameError
from worker.config import WorkerAddress

SETTINGS = FrontEndSettings(
    model="m",
    tokenizer_directory="/t",
    listen_fd=7,
    host="127.0.0.1",
    port=8000,
    cluster_token="a secret of the cluster",
    expected_instances=("context-0",),
    request_timeout_ms=1,
    drain_timeout_ms=1,
    log_level="info",
)
UPDATE = MembershipUpdate(
    workers=(
        WorkerAddress(
            incarnation=Incarnation.mint("context-0"),
            role="context",
            host="127.0.0.1",
            port=1,
            pid=2,
        ),
    )
)


@pytest.mark.parametrize("message", [SETTINGS, UPDATE, MembershipUpdate(workers=())])
def test_messages_survive_the_wire(message: FrontEndSettings | MembershipUpdate) -> None:
    assert LAUNCHER_CODEC.decode(LAUNCHER_CODEC.encode(message)) == message


async def test_frames_are_read_one_after_the_other() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(LAUNCHER_CODEC.encode(SETTINGS) + LAUNCHER_CODEC.encode(UPDATE))
    reader.feed_eof()
    assert await LAUNCHER_CODEC.read(reader) == SETTINGS
    assert await LAUNCHER_CODEC.read(reader) == UPDATE
    with pytest.raises(asyncio.IncompleteReadError):
        await LAUNCHER_CODEC.read(reader)


def test_a_secret_is_not_shown() -> None:
    assert "a secret" not in repr(SETTINGS)


def test_something_else_is_refused() -> None:
    with pytest.raises(FrameError):
        LAUNCHER_CODEC.decode(LAUNCHER_CODEC.encode(UPDATE)[:-1])
