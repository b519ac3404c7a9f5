"""Passes on torch tensors do what the host's do: by torch on the CPU and on a GPU, by kernels on a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.devices import usable
from transfer.copy_plan import CopyPlan
from transfer.host_copies import HostCopies
from transfer.plan import Fragment, GroupPlan, GroupSide
from worker.device_copies import DeviceCopies, IndexedUnits, UnitIndex

Bytes = npt.NDArray[np.uint8]
HOST = HostCopies()
UNTOUCHED = 0xEE


def by_torch() -> DeviceCopies:
    return DeviceCopies(IndexedUnits())


def by_kernels() -> DeviceCopies:
    from worker.device_kernels import TritonUnits

    return DeviceCopies(TritonUnits())


WAYS = (
    pytest.param("cpu", by_torch, id="cpu"),
    pytest.param("cuda", by_torch, id="cuda-torch", marks=pytest.mark.gpu),
    pytest.param(
        "cuda",
        by_kernels,
        id="cuda-kernels",
        # Kernels are compiled: units of all sizes, addresses of all kinds.
        marks=(pytest.mark.gpu, pytest.mark.timeout(300)),
    ),
)
way = pytest.mark.parametrize(("device", "make"), WAYS)
Make = Callable[[], DeviceCopies]


@st.composite
def groups(draw: st.DrawFn) -> GroupPlan:
    """Pieces of two pools on either end, with gaps, in another order at the receiver; all in steps
    that make units from one byte to some KiB.
    """
    step = draw(st.sampled_from([1, 2, 6, 8, 48, 512, 1536]))
    pieces = draw(
        st.lists(
            st.tuples(*[st.integers(0, 1)] * 2, *[st.integers(0, 2)] * 2, st.integers(1, 4)),
            min_size=1,
            max_size=6,
        )
    )
    order = draw(st.permutations(range(len(pieces))))
    sender, receiver = [step, step], [step, step]
    starts = []
    for origin, _, gap, _, size in pieces:
        starts.append(sender[origin] + gap * step)
        sender[origin] = starts[-1] + size * step
    fragments = []
    for number in order:
        origin, place, _, gap, size = pieces[number]
        target = receiver[place] + gap * step
        receiver[place] = target + size * step
        fragments.append(Fragment(origin, starts[number], place, target, size * step))
    return GroupPlan(
        GroupSide(0, 0, tuple(sender)), GroupSide(0, 0, tuple(receiver)), tuple(fragments)
    )


def scattered(random: np.random.Generator, blocks: int, slots: int) -> npt.NDArray[np.int32]:
    return random.permutation(slots)[:blocks].astype(np.int32)


def shifted(values: Bytes, offset: int, device: str) -> torch.Tensor:
    """A tensor of these bytes whose address is ``offset`` bytes past an aligned one."""
    raw = torch.zeros(values.size + offset, dtype=torch.uint8, device=device)
    flat = raw[offset:]
    flat.copy_(torch.from_numpy(values.reshape(-1)))
    return flat.view(values.shape)


@way
@settings(max_examples=60, deadline=None)
@given(
    group=groups(),
    blocks=st.integers(0, 7),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0, 1, 2, 4, 8]),
)
def test_passes_equal_those_of_the_host(
    device: str, make: Make, group: GroupPlan, blocks: int, seed: int, shift: int
) -> None:
    usable(device)
    copies, plan, slots = make(), CopyPlan.of(group), 2 * blocks + 1
    random = np.random.default_rng(seed)
    sources = [
        random.integers(0, 256, (slots, size), dtype=np.uint8) for size in group.sender.slot_bytes
    ]
    places = [np.full((slots, size), UNTOUCHED, np.uint8) for size in group.receiver.slot_bytes]
    origin, target = scattered(random, blocks, slots), scattered(random, blocks, slots)
    origin.flags.writeable = target.flags.writeable = False
    message = np.empty(blocks * plan.block_bytes, dtype=np.uint8)
    # Addresses of pools and message need not be as aligned as their units.
    pools = [shifted(pool, shift, device) for pool in sources]
    targets = [shifted(pool, shift, device) for pool in places]
    sent = shifted(np.full_like(message, UNTOUCHED), gcd(shift, 4), device)
    HOST.gather(plan, sources, origin, message)
    copies.gather(plan, pools, origin, sent)
    assert np.array_equal(sent.cpu().numpy(), message)
    HOST.scatter(plan, message, places, target)
    copies.scatter(plan, sent, targets, target)
    for got, expected in zip(targets, places, strict=True):
        assert np.array_equal(got.cpu().numpy(), expected)
    for kept, original in zip(pools, sources, strict=True):
        assert np.array_equal(kept.cpu().numpy(), original)


PLAN = CopyPlan.of(
    GroupPlan(
        GroupSide(0, 0, (10,)),
        GroupSide(0, 0, (4, 8)),
        (Fragment(0, 6, 0, 2, 2), Fragment(0, 2, 0, 0, 2), Fragment(0, 0, 1, 4, 2)),
    )
)


@pytest.mark.parametrize(
    ("slots", "message_bytes", "slot_bytes", "said"),
    [
        ([0, 4], 12, 10, "pool 0 has 4 slots, got slots from 0 to 4"),
        ([-1, 0], 12, 10, "pool 0 has 4 slots, got slots from -1 to 0"),
        ([0, 1], 11, 10, "message of 2 blocks: expected 12 contiguous bytes"),
        ([0, 1], 12, 8, "pool 0: expected contiguous slots of 10 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    slots: list[int], message_bytes: int, slot_bytes: int, said: str
) -> None:
    message = torch.ones(message_bytes, dtype=torch.uint8)
    pool = torch.zeros((4, slot_bytes), dtype=torch.uint8)
    with pytest.raises(ValueError, match=said):
        by_torch().gather(PLAN, [pool], np.array(slots, dtype=np.int32), message)
    assert message.all()


def test_scatter_checks_all_pools_first() -> None:
    pools = [torch.zeros((4, 4), dtype=torch.uint8), torch.zeros((2, 8), dtype=torch.uint8)]
    message = torch.ones(12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pool 1 has 2 slots"):
        by_torch().scatter(PLAN, message, pools, np.array([0, 3], dtype=np.int32))
    strided = torch.ones(24, dtype=torch.uint8)[::2]
    with pytest.raises(ValueError, match="strides"):
        by_torch().scatter(PLAN, strided, pools, np.array([0, 1], dtype=np.int32))
    assert not pools[0].any()


def test_long_units_move_in_pieces_and_no_pass_uploads_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[UnitIndex] = []
    move = IndexedUnits.gather

    def spy(
        self: IndexedUnits, pool: torch.Tensor, index: UnitIndex, message: torch.Tensor
    ) -> None:
        seen.append(index)
        move(self, pool, index, message)

    monkeypatch.setattr(IndexedUnits, "gather", spy)
    side = GroupSide(0, 0, (4096,))
    plan = CopyPlan.of(GroupPlan(side, side, (Fragment(0, 2048, 0, 0, 2048),)))
    copies, pool = by_torch(), torch.arange(2 * 4096).to(torch.uint8).view(2, 4096)
    message = torch.empty(2048, dtype=torch.uint8)
    for slot in (1, 0):
        copies.gather(plan, [pool], np.array([slot], dtype=np.int32), message)
        assert torch.equal(message, pool[slot, 2048:])
    first, second = seen
    assert (first.unit_words, first.slot_units, first.units.tolist()) == (64, 8, [4, 5, 6, 7])
    assert first.units is second.units


@pytest.mark.gpu
@pytest.mark.parametrize("make", [by_torch, by_kernels])
def test_offsets_past_two_to_the_thirty_first(make: Make) -> None:
    """In bytes and in units: a pool of more than 2**31 units of two bytes."""
    usable("cuda")
    side = GroupSide(0, 0, (1 << 20,))
    plan = CopyPlan.of(GroupPlan(side, side, (Fragment(0, 6, 0, 2, 4), Fragment(0, 2, 0, 8, 2))))
    assert [part.unit_bytes for part in plan.parts] == [2]
    slots = 4100
    pool = torch.zeros((slots, 1 << 20), dtype=torch.uint8, device="cuda")
    last = torch.arange(16, dtype=torch.uint8, device="cuda")
    pool[slots - 1, :16] = last
    message = torch.empty(6, dtype=torch.uint8, device="cuda")
    make().gather(plan, [pool], np.array([slots - 1], dtype=np.int32), message)
    assert message.tolist() == [2, 3, 6, 7, 8, 9]
    make().scatter(plan, message, [pool], np.array([slots - 2], dtype=np.int32))
    assert pool[slots - 2, :12].tolist() == [0, 0, 6, 7, 8, 9, 0, 0, 2, 3, 0, 0]
    assert int(pool[: slots - 2].count_nonzero()) == 0
