"""Which staged pieces lie as their message does, so that one end has nothing to copy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.transfer.geometries import Attention, Side, same_model
from tests.transfer.test_pair_posts import DONE, LOST, Rig
from transfer.outcome import PostStatus
from transfer.page_staging import HostStaging
from transfer.pair_staging import PairStaging
from transfer.passes import AtOnce
from transfer.plan import TransferPlan
from transfer.region import Region, Staged

LAYERS = (Attention(4), Attention(4))
WHOLE = Side(stages=(2,))
SPLIT = Side(tp=2, stages=(2,))
SMALL_PAGES = Side(stages=(2,), page_tokens=4)


def staging(sender: Side, receiver: Side) -> PairStaging:
    pair = same_model(sender, receiver, LAYERS)
    plan = TransferPlan.between(pair.senders(0)[-1], pair.receivers(0)[-1])
    return PairStaging(plan, HostStaging({}, AtOnce()))


def piece(*slots: int) -> Staged:
    return Staged(0, np.array(slots, dtype=np.int32))


@pytest.mark.parametrize(
    ("sender", "receiver", "sent", "received"),
    [
        (WHOLE, WHOLE, True, True),
        (SPLIT, WHOLE, True, False),
        (WHOLE, SPLIT, False, True),
        (WHOLE, SMALL_PAGES, True, False),
        (SMALL_PAGES, WHOLE, True, False),
    ],
    ids=["equal", "tp 2->1", "tp 1->2", "to smaller pages", "from smaller pages"],
)
def test_whole_slots_are_sent_and_received_where_they_lie(
    sender: Side, receiver: Side, *, sent: bool, received: bool
) -> None:
    pair = staging(sender, receiver)
    region = Region(0, 0, 5, 3)
    assert pair.sent_from(piece(5, 6, 7)) == (region if sent else None)
    assert pair.received_into(piece(5, 6, 7)) == (region if received else None)
    assert pair.sent_from(piece(7)) == (Region(0, 0, 7, 1) if sent else None)
    for apart in (piece(5, 7), piece(6, 5), piece(5, 5)):
        assert pair.sent_from(apart) is None
        assert pair.received_into(apart) is None


def neighbours(*slots: int) -> Staged:
    """Of the group whose layouts are equal."""
    return Staged(1, np.array(slots, dtype=np.int32))


def test_neighbours_are_posted_themselves_and_take_no_buffer() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.send(neighbours(3, 4))
    rig.receive(neighbours(6))
    pool = rig.memory.pools[1, 0]
    for request, slots in zip(rig.requests, (pool[3:5], pool[6:7]), strict=True):
        assert np.array_equal(request.buffer, slots.reshape(-1))
        assert np.shares_memory(request.buffer, slots)
        request.end(DONE)
    assert [status for _, status, _ in rig.over] == [PostStatus.DONE, PostStatus.DONE]
    assert rig.counters.staged_bytes_total == 0
    # A peer that is lost may still reach the pages, and no buffer of ours.
    rig.receive(neighbours(7))
    rig.requests[-1].end(LOST)
    assert rig.over[-1] == (0, PostStatus.LOST, "gone")
    assert rig.counters.staging_bytes_in_doubt == 0


def test_slots_apart_are_copied_and_counted() -> None:
    rig = Rig()
    rig.posts.bind(rig.endpoint)
    rig.send(neighbours(3, 5))
    pool = rig.memory.pools[1, 0]
    assert np.array_equal(rig.requests[0].buffer, pool[[3, 5]].reshape(-1))
    assert not np.shares_memory(rig.requests[0].buffer, pool)
    assert rig.counters.staged_bytes_total == 64
    rig.run()
    rig.receive(neighbours(8, 6))
    rig.requests[1].buffer[:] = 7
    rig.requests[1].end(DONE)
    assert rig.counters.staged_bytes_total == 128
    assert (pool[[8, 6]] == 7).all()
