"""Who has sessions with whom: the ranks with pages, leaders, and nobody who is left out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.transfer.carried import reasons
from tests.transfer.geometries import Attention, Side, geometry, same_model
from transfer.identity import Incarnation
from transfer.peers import granters_to, receivers_from, require_dp_group
from transfer.rank_info import RankInfo

LAYERS = (Attention(4), Attention(4))
ONE_HEAD = (Attention(1), Attention(1))
WHOLE = Side(stages=(2,))


def ranks(infos: tuple[RankInfo, ...]) -> list[int]:
    return [info.rank for info in infos]


def test_leaders_have_a_session_with_each_other_and_with_whom_nobody_receives_from() -> None:
    stages = same_model(Side(stages=(1, 1)), Side(stages=(1, 1)), LAYERS)
    for number, sender in enumerate(stages.senders(0)):
        assert ranks(granters_to(sender, stages.receivers(0), 0)) == [number]
    replicas = same_model(replace(WHOLE, tp=2), replace(WHOLE, tp=2, dp=2), ONE_HEAD)
    for dp_rank in (0, 1):
        receivers = replicas.receivers(dp_rank)
        for number, sender in enumerate(replicas.senders(0)):
            # One of the two is elected for the group's only rank; that one has a session with both.
            assert bool(receivers_from(sender, receivers, dp_rank)) is (number == dp_rank)
            assert ranks(granters_to(sender, receivers, dp_rank)) == [0]
    # Stages of the second group take turns the other way round.
    turns = same_model(
        Side(tp=2, stages=(3,)), Side(tp=2, dp=2, stages=(1, 1, 1)), (Attention(1),) * 3
    )
    leader, other = turns.senders(0)
    assert ranks(receivers_from(leader, turns.receivers(1), 1)) == [1]
    assert ranks(granters_to(leader, turns.receivers(1), 1)) == [0, 1]
    assert ranks(granters_to(other, turns.receivers(1), 1)) == [0, 2]


@settings(max_examples=50, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_every_sender_is_granted_by_all_whom_it_has_pages_for(random: Random) -> None:
    pair = geometry(random)
    dp_rank = random.randrange(pair.receiver.dp)
    senders, receivers = pair.senders(0), pair.receivers(dp_rank)
    assume(not reasons(senders, receivers))
    for sender in senders:
        granters = set(ranks(granters_to(sender, receivers, dp_rank)))
        fed = set(ranks(receivers_from(sender, receivers, dp_rank)))
        assert granters
        assert granters - fed <= {0}
        assert granters >= fed
        assert not sender.shape.leads or 0 in granters


def test_the_ranks_of_a_request_are_one_whole_group_of_one_incarnation() -> None:
    pair = same_model(replace(WHOLE, tp=2, dp=2), WHOLE, LAYERS)
    first, other = (
        info.model_copy(update={"rank": rank})
        for rank, info in enumerate([*pair.senders(0), *pair.senders(1)])
    )
    require_dp_group([first])
    restarted = first.model_copy(update={"incarnation": Incarnation.mint("x")})
    for wrong, why in (
        ([], "none were given"),
        ([first, other], "of others too"),
        ([first, first], "1 of 1 ranks"),
        ([first, restarted], "one incarnation"),
    ):
        with pytest.raises(ValueError, match=why):
            require_dp_group(wrong)
