"""What a session sees of a lease: states at the prompt's last block, blocks of one sender alone."""

from __future__ import annotations

from random import Random

import pytest

from tests.transfer.filled_pools import FilledPools
from tests.transfer.geometries import Attention, Recurrent, Side, same_model
from tests.transfer.instance_rig import RankLease
from transfer.leased_pages import LeasedPages
from transfer.plan import TransferPlan

PROMPT = 20
"""Three blocks of eight tokens."""


def test_a_state_stands_at_the_prompts_last_block_only() -> None:
    pair = same_model(Side(stages=(2,)), Side(stages=(2,)), (Attention(2), Recurrent(2)))
    (sender,), (receiver,) = pair.senders(0), pair.receivers(0)
    pools = FilledPools(receiver, PROMPT, Random(1))
    plan = TransferPlan.between(sender, receiver)
    (state,) = (
        index for index, group in enumerate(plan.groups) if group.receiver.held.life_cycle.is_state
    )
    pages = LeasedPages(
        {group.layer_group: group.layer_group for group in pools.info.page_table.groups}
    )
    (slot,) = pools.slots[plan.groups[state].receiver.layer_group].tolist()
    for read in (pages.to_send, pages.to_receive):
        for span, expected in (
            ((0, 2), [-1, -1]),
            ((0, 3), [-1, -1, slot]),
            ((2, 3), [slot]),
            ((3, 3), []),
        ):
            lease = RankLease(pools, {}, *span)
            assert read(plan, lease, PROMPT).groups[state].slots.tolist() == expected
            other = read(plan, lease, PROMPT).groups[1 - state].slots
            assert (
                other.tolist()
                == pools.slots[plan.groups[1 - state].receiver.layer_group][
                    span[0] : span[1]
                ].tolist()
            )
    pools.slots[plan.groups[state].receiver.layer_group] = pools.slots[0].repeat(2)
    with pytest.raises(ValueError, match="one slot of a state"):
        pages.to_send(plan, RankLease(pools, {}, 0, 3), PROMPT)


def test_only_blocks_of_the_sender_are_wanted_from_it() -> None:
    pair = same_model(Side(cp=2), Side(), (Attention(2),))
    (receiver,) = pair.receivers(0)
    pools = FilledPools(receiver, PROMPT, Random(1))
    first, second, third = pools.slots[0].tolist()
    pages = LeasedPages({0: 0})
    for sender, span, expected in (
        (0, (0, 3), [first, -1, third]),
        (1, (0, 3), [-1, second, -1]),
        (0, (1, 3), [-1, third]),
    ):
        plan = TransferPlan.between(pair.senders(0)[sender], receiver)
        blocks = pages.to_receive(plan, RankLease(pools, {}, *span), PROMPT)
        assert blocks.groups[0].slots.tolist() == expected
