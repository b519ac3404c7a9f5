"""Facts on the wire: later releases may add some, the version is looked at before any is read."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tests.support.transfers import layout, rank_info
from transfer.messages import CONTROL_CODEC, Introduction
from transfer.rank_info import ParallelShape, RankInfo
from transfer.wire import HEADER, MAGIC, PROTOCOL_VERSION, FrameError

DRAFTING = rank_info(layout(draft_heads=2))
PLAIN = rank_info(layout())


def body_of(info: RankInfo) -> dict[str, Any]:
    """The rank's facts as they travel."""
    body = msgpack.unpackb(CONTROL_CODEC.encode(Introduction(rank_info=info))[HEADER.size :])
    facts: dict[str, Any] = body["rank_info"]
    return facts


def read(facts: dict[str, Any]) -> RankInfo:
    """What a peer makes of them."""
    message = {"kind": "introduction", "rank_info": facts, "endpoint_nonce": b""}
    introduction = CONTROL_CODEC.decode_body(msgpack.packb(message))
    assert isinstance(introduction, Introduction)
    return introduction.rank_info


@pytest.mark.parametrize("info", [DRAFTING, PLAIN], ids=["drafts", "none"])
def test_facts_that_a_later_release_adds_are_ignored(info: RankInfo) -> None:
    facts = body_of(info)
    table = facts["page_table"]
    for place in (
        facts,
        facts["shape"],
        facts["engine"],
        table,
        table["groups"][0],
        table["views"][0],
        table["views"][0]["buffers"][0],
    ):
        place["of_a_later_release"] = {"any": ["thing"]}
    assert read(facts) == info


def test_draft_facts_are_absent_when_there_are_none() -> None:
    names = {"num_draft_layers", "draft_kv_dtype"}
    assert not names & set(body_of(PLAIN))
    assert names <= set(body_of(DRAFTING))
    assert read(body_of(PLAIN)).num_draft_layers is None


def test_the_size_of_staged_messages_is_told_where_it_is_not_the_usual_one() -> None:
    assert "staging_message_bytes" not in body_of(PLAIN)
    device = PLAIN.model_copy(update={"can_stage": True, "staging_message_bytes": 32 << 20})
    assert body_of(device)["staging_message_bytes"] == 32 << 20
    assert read(body_of(device)) == device


def test_optional_facts_may_be_left_out_by_an_earlier_release() -> None:
    facts = body_of(PLAIN)
    del facts["engine"]["kv_scales"]
    for view in facts["page_table"]["views"]:
        del view["sections"]
    assert read(facts) == PLAIN


def test_required_facts_may_not() -> None:
    facts = body_of(PLAIN)
    del facts["engine"]["rope"]
    with pytest.raises(FrameError, match="rope"):
        read(facts)


@pytest.mark.parametrize("body", [b"", b"\xc1 no msgpack", msgpack.packb({"kind": "unheard of"})])
def test_the_version_is_looked_at_before_the_body(body: bytes) -> None:
    other = PROTOCOL_VERSION + 1
    frame = HEADER.pack(MAGIC, other, len(body)) + body
    with pytest.raises(FrameError, match=f"ours is {PROTOCOL_VERSION}, the peer's is {other}"):
        CONTROL_CODEC.decode(frame)


def test_attention_groups_are_neighbouring_ranks() -> None:
    shape = ParallelShape(tp_size=8, tp_rank=5, dp_size=2, dp_rank=1)
    assert (shape.attention_tp_size, shape.attention_tp_rank) == (4, 1)
    with pytest.raises(ValueError, match="tp_rank 5 is in dp group 1, got dp_rank 0"):
        ParallelShape(tp_size=8, tp_rank=5, dp_size=2, dp_rank=0)
