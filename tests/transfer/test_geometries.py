"""Every byte of every live block is written once with the right value, or the pair is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_core.spec import ElementType, ReusePolicy
from tests.transfer.carried import Request, reasons
from tests.transfer.geometries import (
    LONGEST_TOKENS,
    Attention,
    Geometry,
    Recurrent,
    Side,
    geometry,
    same_model,
)
from transfer.rank_info import RankInfo


def groups_of_a_request(pair: Geometry, random: Random) -> tuple[list[RankInfo], list[RankInfo]]:
    """The ranks that a request meets: one data parallel group of either side."""
    return (
        pair.senders(random.randrange(pair.sender.dp)),
        pair.receivers(random.randrange(pair.receiver.dp)),
    )


@settings(max_examples=100, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_every_byte_arrives_once_or_the_pair_is_refused(random: Random) -> None:
    pair = geometry(random)
    senders, receivers = groups_of_a_request(pair, random)
    refused = {row.field for row in reasons(senders, receivers)}
    if refused:
        # Of one model only what no plan maps.
        served_alike = (
            pair.sender_layers == pair.receiver_layers
            and pair.sender_drafts == pair.receiver_drafts
        )
        assert not served_alike or refused <= {"cp_size", "target section cut"}
        return
    prompt = random.randint(1, LONGEST_TOKENS)
    Request(random, prompt, pair.tokens_per_block).carry(senders, receivers)


def test_nearly_all_random_pairs_are_accepted() -> None:
    accepted = 0
    for seed in range(200):
        random = Random(seed)
        accepted += not reasons(*groups_of_a_request(geometry(random), random))
    assert accepted >= 0.8 * 200


LAYERS = (Attention(4), Attention(2, window=17), Attention(4, kv_factor=1))
DRAFTS = (Attention(4, head_dim=6, dtype=ElementType.BFLOAT16), Attention(2, window=17))
ONE_HEAD = tuple(replace(layer, heads=1) for layer in LAYERS)
WHOLE = Side(stages=(3,))
HALVES = Side(stages=(2, 1))

NAMED = {
    "equal": same_model(WHOLE, WHOLE, LAYERS, DRAFTS),
    **{
        f"tp {ours}->{theirs}": same_model(
            replace(WHOLE, tp=ours), replace(WHOLE, tp=theirs), LAYERS, DRAFTS
        )
        for ours, theirs in ((1, 2), (2, 1), (4, 2), (2, 4))
    },
    "pp 2->1": same_model(HALVES, WHOLE, LAYERS, DRAFTS),
    "pp 1->2": same_model(WHOLE, HALVES, LAYERS, DRAFTS),
    "dp of the sender": same_model(replace(WHOLE, tp=2, dp=2), WHOLE, LAYERS, DRAFTS),
    "dp of the receiver": same_model(
        replace(WHOLE, tp=2), replace(WHOLE, tp=2, dp=2), LAYERS, DRAFTS
    ),
    **{
        f"one head at tp {ours}->{theirs}": same_model(
            replace(WHOLE, tp=ours), replace(WHOLE, tp=theirs), ONE_HEAD, DRAFTS
        )
        for ours, theirs in ((2, 2), (4, 4), (2, 4), (4, 1), (1, 2))
    },
    "cp 1->2": same_model(WHOLE, replace(WHOLE, cp=2), LAYERS, DRAFTS),
}


MIXED = (
    Attention(4, dtype=ElementType.PACKED4),
    Attention(1, head_dim=6, kv_factor=1, dtype=ElementType.FLOAT8_E4M3),
    Attention(2, index_keys=True),
    Attention(4, window=17, sink_tokens=3),
    Recurrent(4, units=(1, 3)),
    Recurrent(2, units=(2, 4), dtype=ElementType.PACKED4),
)
MIXED_DRAFTS = (Attention(4, dtype=ElementType.FLOAT8_E4M3, policy=ReusePolicy.OPTIONAL),)
MIXED_SIDES = (
    Side(stages=(6,), drafts=True),
    Side(tp=2, stages=(6,), drafts=True, page_tokens=4),
    Side(stages=(4, 2), cp=3, drafts=True, own_draft_pools=True, draft_page_tokens=2),
    Side(tp=8, dp=2, stages=(6,), drafts=True),
    Side(tp=2, dp=2, stages=(1, 1, 1, 3), page_tokens=2, longest_tokens=17),
)


@pytest.mark.parametrize("receiver", MIXED_SIDES)
@pytest.mark.parametrize("sender", MIXED_SIDES)
def test_a_model_of_all_kinds_of_layers(sender: Side, receiver: Side) -> None:
    pair = same_model(sender, receiver, MIXED, MIXED_DRAFTS)
    senders, receivers = pair.senders(0), pair.receivers(receiver.dp - 1)
    assert not reasons(senders, receivers)
    # The longest sequence of one side is as long as the window.
    prompt = 17 if sender.longest_tokens or receiver.longest_tokens else 33
    request = Request(Random(7), prompt, pair.tokens_per_block)
    request.carry(senders, receivers)
    assert request.checked_bytes


@pytest.mark.parametrize("drafts", ["none", "both", "the sender's", "the receiver's"])
@pytest.mark.parametrize("name", NAMED)
def test_named_pairs_are_accepted(name: str, drafts: str) -> None:
    base = NAMED[name]
    pair = replace(
        base,
        sender=replace(base.sender, drafts=drafts in ("both", "the sender's")),
        receiver=replace(base.receiver, drafts=drafts in ("both", "the receiver's")),
    )
    for dp_rank in range(pair.receiver.dp):
        senders, receivers = pair.senders(pair.sender.dp - 1), pair.receivers(dp_rank)
        owners = {view.owner for info in receivers for view in info.page_table.views}
        assert owners == {"target"} | ({"draft"} if pair.receiver.drafts else set())
        assert not reasons(senders, receivers)
        for prompt in (1, 8, 37):
            request = Request(Random(prompt), prompt, pair.tokens_per_block)
            request.carry(senders, receivers)
            assert request.checked_bytes
