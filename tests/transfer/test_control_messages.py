"""Wire bytes of every control message: stable, small, and refused when wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transfers import rank_info
from transfer.identity import Incarnation
from transfer.messages import (
    CONTROL_CODEC,
    Announce,
    CancelSession,
    Challenge,
    ChoiceHandoff,
    ChunkSent,
    ControlMessage,
    Grant,
    GroupRuns,
    GroupSlots,
    Handoff,
    HandoffData,
    HandoffLogprob,
    Heartbeat,
    Hello,
    Introduction,
    NoDecode,
    PeerRefused,
    PrefixFound,
    Pull,
    PullDeclined,
    Received,
    ReceiveReady,
    SenderFailed,
    Welcome,
)
from transfer.rank_info import EngineFacts, PageTable, ParallelShape, RankInfo
from transfer.wire import HEADER, FrameError, pack_ints, unpack_ints

GOLDEN = Path(__file__).parent.parent / "golden" / "control_messages.json"
INFO = RankInfo(
    incarnation=Incarnation(instance="ctx", nonce="00ff"),
    rank=0,
    shape=ParallelShape(),
    layers_per_stage=(2,),
    tokens_per_block=64,
    engine=EngineFacts(
        model="m", model_hash="h", rope=(), kv_dtype="bfloat16", attention="grouped"
    ),
    page_table=PageTable(groups=(), views=()),
    data_host="127.0.0.1",
    data_port=7,
)
MESSAGES: tuple[ControlMessage, ...] = (
    Challenge(nonce=b"\x01" * 32),
    Hello(proof=b"\x02" * 32, nonce=b"\x03" * 32),
    Welcome(proof=b"\x04" * 32),
    Introduction(
        rank_info=INFO,
        endpoint_nonce=b"\x05" * 32,
        meant_for=Incarnation(instance="ctx", nonce="00ff"),
        meant_for_rank=1,
    ),
    PeerRefused(reasons=("model: ours is a, the peer's is b",)),
    Heartbeat(),
    Grant(request_id="r", session="s", prompt_tokens=100, deadline_ms=1000, receivers=2),
    Pull(
        request_id="r/pull",
        session="s",
        scope=b"\x07" * 32,
        tokens=pack_ints([5, 6]),
        least_blocks=2,
        deadline_ms=1000,
        receivers=2,
    ),
    PrefixFound(session="s", end_block=3),
    PullDeclined(session="s", reason="not here"),
    Announce(session="s"),
    ReceiveReady(
        session="s",
        tag=2**64 - 1,
        end_block=4,
        groups=(
            GroupSlots(first_block=1, slots=pack_ints([7, -1, 9])),
            GroupSlots(first_block=4, slots=b""),
        ),
    ),
    ChunkSent(
        session="s",
        chunk=0,
        groups=(GroupRuns(first_block=1, end_block=4, run_blocks=pack_ints([1, 1])),),
    ),
    Handoff(
        session="s",
        data=HandoffData(
            choices=(
                ChoiceHandoff(token=5, logprob=HandoffLogprob(logprob=-0.5, top=((5, -0.5),))),
                ChoiceHandoff(token=2, finish="stop"),
            ),
            cached_tokens=64,
        ),
    ),
    NoDecode(session="s"),
    Received(session="s"),
    CancelSession(session="s", reason="client went away"),
    SenderFailed(session="s", reason="out of memory"),
)


def test_golden_bytes() -> None:
    """A changed byte means a new PROTOCOL_VERSION; then write this file anew."""
    golden = json.loads(GOLDEN.read_text())
    assert {message.kind: CONTROL_CODEC.encode(message).hex() for message in MESSAGES} == golden


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: ControlMessage) -> None:
    assert CONTROL_CODEC.decode(CONTROL_CODEC.encode(message)) == message


def test_every_kind_has_a_golden_message() -> None:
    kinds = {message.kind for message in MESSAGES}
    assert len(kinds) == len(MESSAGES) == 18


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_unknown_field_and_wrong_type_are_refused(message: ControlMessage) -> None:
    body = msgpack.unpackb(CONTROL_CODEC.encode(message)[HEADER.size :])
    for changed in ({**body, "extra": 1}, {**body, "kind": "unheard of"}, {**body, "kind": 3}):
        with pytest.raises(FrameError):
            CONTROL_CODEC.decode_body(msgpack.packb(changed))
    for name in set(body) - {"kind"}:
        with pytest.raises(FrameError):
            CONTROL_CODEC.decode_body(msgpack.packb({**body, name: {"wrong": True}}))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_numbers_that_nobody_can_calculate_with_are_refused(message: ControlMessage) -> None:
    body = msgpack.unpackb(CONTROL_CODEC.encode(message)[HEADER.size :])
    for holder, key in list(numbers_in(body)):
        right = holder[key]
        for wrong in (-2, 1 << 63) if key != "tag" else (-1,):
            holder[key] = wrong
            with pytest.raises(FrameError):
                CONTROL_CODEC.decode_body(msgpack.packb(body))
        holder[key] = right
    assert CONTROL_CODEC.decode_body(msgpack.packb(body)) == message


def numbers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where an unpacked message has numbers: holder and key."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in places:
        if type(part) is int:
            yield value, key
        elif isinstance(part, dict | list):
            yield from numbers_in(part)


@given(body=st.binary(max_size=200))
def test_random_bytes_raise_frame_errors_only(body: bytes) -> None:
    with contextlib.suppress(FrameError):
        CONTROL_CODEC.decode_body(body)


@given(slots=st.lists(st.integers(-1, 2**31 - 1), max_size=50))
def test_slots_travel_packed(slots: list[int]) -> None:
    message = ReceiveReady(
        session="s",
        tag=1,
        end_block=len(slots),
        groups=(GroupSlots(first_block=0, slots=pack_ints(slots)),),
    )
    back = CONTROL_CODEC.decode(CONTROL_CODEC.encode(message))
    assert isinstance(back, ReceiveReady)
    assert np.array_equal(unpack_ints(back.groups[0].slots), np.array(slots, dtype=np.int32))


def test_draft_facts_are_absent_from_the_wire_when_there_are_none() -> None:
    frame = CONTROL_CODEC.encode(Introduction(rank_info=INFO))
    assert b"draft" not in frame
    assert b"num_draft_layers" in CONTROL_CODEC.encode(Introduction(rank_info=rank_info()))


def test_a_rank_info_that_contradicts_itself_is_refused() -> None:
    fields = INFO.model_dump()
    for change in (
        {"layers_per_stage": (1, 1)},
        {"num_draft_layers": 1},
        {"shape": {"tp_size": 2, "tp_rank": 2}},
        {"shape": {"tp_size": 3, "dp_size": 2}},
        {"data_port": 1 << 16},
        {"shape": {"tp_size": 1 << 40}},
        {"tokens_per_block": 1 << 40},
    ):
        with pytest.raises(ValueError, match="validation error"):
            RankInfo.model_validate({**fields, **change})
