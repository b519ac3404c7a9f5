"""Requests between several ranks a side: agents over the in-process transport, bytes checked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcache_core.spec import ElementType, ReusePolicy
from tests.transfer.carried import reasons
from tests.transfer.geometries import (
    LONGEST_TOKENS,
    Attention,
    Recurrent,
    Side,
    geometry,
    same_model,
)
from tests.transfer.instance_rig import instances

LAYERS = (Attention(4), Attention(2, window=17), Attention(4, kv_factor=1))
DRAFTS = (Attention(2, dtype=ElementType.BFLOAT16, policy=ReusePolicy.OPTIONAL),)
ONE_HEAD = tuple(replace(layer, heads=1) for layer in LAYERS)
STATES = (*LAYERS[:2], Recurrent(4, units=(1, 3)))
WHOLE = Side(stages=(3,), drafts=True)
HALVES = replace(WHOLE, stages=(2, 1))


def tp(size: int, dp: int = 1) -> Side:
    return replace(WHOLE, tp=size, dp=dp)


ALONE = replace(WHOLE, drafts=False)
NAMED = {
    "equal": (WHOLE, WHOLE, LAYERS),
    "tp 2->1": (tp(2), WHOLE, LAYERS),
    "tp 1->2": (WHOLE, tp(2), LAYERS),
    "tp 2->4": (tp(2), tp(4), LAYERS),
    "tp 4->2": (tp(4), tp(2), LAYERS),
    "pp 2->1": (HALVES, WHOLE, LAYERS),
    "pp 1->2": (WHOLE, HALVES, LAYERS),
    "dp of the sender": (tp(2, 2), WHOLE, LAYERS),
    "dp of the receiver": (tp(2), tp(2, 2), LAYERS),
    "one head at tp 2->2": (tp(2), tp(2), ONE_HEAD),
    "one head at tp 2->1": (tp(2), WHOLE, ONE_HEAD),
    "one head at tp 1->2": (WHOLE, tp(2), ONE_HEAD),
    "one head, dp of the receiver": (tp(2), tp(2, 2), ONE_HEAD),
    "one head, stages and dp of the receiver": (
        tp(2),
        replace(tp(2, 2), stages=(1, 1, 1)),
        ONE_HEAD,
    ),
    "cp 1->2": (WHOLE, replace(WHOLE, cp=2), LAYERS),
    "cp 2->1": (replace(WHOLE, cp=2), WHOLE, LAYERS),
    "cp 2->2": (replace(WHOLE, cp=2), replace(WHOLE, cp=2), LAYERS),
    "tp 2, pp 2 -> cp 2": (replace(HALVES, tp=2), replace(WHOLE, cp=2), LAYERS),
    "the sender drafts alone": (tp(2), ALONE, LAYERS),
    "the receiver drafts alone": (ALONE, tp(2), LAYERS),
    "the receiver drafts alone in a stage": (ALONE, replace(WHOLE, stages=(3, 0)), LAYERS),
    "states, tp 2->1": (tp(2), WHOLE, STATES),
    "states, tp 1->2": (WHOLE, tp(2), STATES),
    "states, cp 1->2": (WHOLE, replace(WHOLE, cp=2), STATES),
    "states, cp 2->1": (replace(WHOLE, cp=2), WHOLE, STATES),
}


@pytest.mark.parametrize("prompt_tokens", [8, 37])
@pytest.mark.parametrize("name", NAMED)
async def test_every_byte_of_every_receiver_arrives(name: str, prompt_tokens: int) -> None:
    sender, receiver, layers = NAMED[name]
    pair = same_model(sender, receiver, layers, DRAFTS)
    random = Random(prompt_tokens)
    async with instances(pair, random, prompt_tokens) as both:
        await both.run(random)


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_any_two_instances_move_a_request(random: Random) -> None:
    pair = geometry(random)
    senders, receivers = pair.senders(0), pair.receivers(0)
    assume(1 < len(senders) * len(receivers) <= 16)
    assume(not reasons(senders, receivers))

    async def move() -> None:
        prompt_tokens = random.randint(1, LONGEST_TOKENS)
        async with instances(pair, random, prompt_tokens) as both:
            await both.run(random)

    asyncio.run(move())
