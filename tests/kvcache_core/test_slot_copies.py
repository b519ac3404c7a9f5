"""Copies of many slots: against a loop over single slots, on every path the copies can take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType
from kvcache_core.storage import TorchStorage, row_copy
from kvcache_core.storage.row_copy import Rows, Transform, copy_rows, run_bounds
from tests.kvcache_core.storage_rig import SLOTS, Rig, attention, every_kind
from tests.support.devices import DEVICES, usable

HOST = 5


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def slots(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


def tiered(device: str) -> Rig:
    plan = every_kind()
    return Rig(plan, device, host_slots=[HOST] * len(plan.pool_groups))


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([5], [6]),
        ([0, 1, 2], [4, 5, 6]),
        ([1, 0], [5, 6]),
        ([0, 1, 2], [6, 4, 5]),
        ([2, 2, 2], [1, 6, 3]),
        ([], []),
    ],
)
def test_copy_slots_copies_all_pools_and_nothing_else(
    sources: list[int], targets: list[int], device: str
) -> None:
    rig = tiered(device)
    rig.fill()
    before = rig.snapshot()
    for group in rig.plan.pool_groups:
        rig.storage.copy_slots(group.id, slots(*sources), slots(*targets))
    kept = [slot for slot in range(SLOTS) if slot not in targets]
    for old_pools, new_pools in zip(before, rig.snapshot(), strict=True):
        for old, new in zip(old_pools, new_pools, strict=True):
            assert torch.equal(new[targets], old[sources])
            assert torch.equal(new[kept], old[kept])


def test_only_the_named_pool_group_is_copied(device: str) -> None:
    rig = tiered(device)
    rig.fill()
    before = rig.snapshot()
    rig.storage.copy_slots(1, slots(0), slots(3))
    rig.storage.demote_slots(0, slots(0), slots(4))
    for number, pools in enumerate(rig.snapshot()):
        for pool, new in enumerate(pools):
            assert torch.equal(new, before[number][pool]) is (number != 1)
    for group in rig.plan.pool_groups:
        for pool in range(len(group.slot_bytes)):
            host = rig.storage.host_pool_bytes(group.id, pool)
            assert bool(host[4].any()) is (group.id == 0)
            assert not host[:4].any()


ROWS = 24


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Distinct targets with runs in them, sources of the same number."""
    permuted = draw(st.permutations(range(ROWS)))
    count = draw(st.integers(0, ROWS))
    chosen = permuted[:count]
    orders = [sorted(chosen), chosen, sorted(chosen, reverse=True)]
    targets = draw(st.sampled_from(orders))
    first = draw(st.integers(0, ROWS - 1))
    straight = [(first + number) % ROWS for number in range(count)]
    sources = draw(st.sampled_from([straight, *orders]))
    return list(sources), list(targets)


@pytest.mark.parametrize("staging_rows", [1, 5, 1000])
@pytest.mark.parametrize("run_bytes", [0, 1 << 40])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copy=copies())
def test_batched_copies_equal_a_loop(
    staging_rows: int,
    run_bytes: int,
    copy: tuple[list[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slice copies of runs, gathers, chunks and transforms give what single copies give."""
    monkeypatch.setattr(row_copy, "STAGING_BYTES", staging_rows * 24)
    monkeypatch.setattr(row_copy, "RUN_BYTES", run_bytes)
    sources, targets = copy
    source = torch.randint(0, 256, (ROWS, 24), dtype=torch.uint8)
    cases: list[tuple[Transform | None, int]] = [(None, 24), (lambda rows: rows[:, ::2] ^ 255, 12)]
    for transform, width in cases:
        target = torch.zeros(ROWS, width, dtype=torch.uint8)
        expected = target.clone()
        for source_slot, target_slot in zip(sources, targets, strict=True):
            row = source[source_slot : source_slot + 1]
            expected[target_slot] = (row if transform is None else transform(row))[0]
        copy_rows(Rows(source, slots(*sources)), Rows(target, slots(*targets)), transform)
        assert torch.equal(target, expected)


def test_runs_are_cut_where_either_side_jumps() -> None:
    assert run_bounds(slots(3, 4, 5, 9, 10), slots(7, 8, 0, 1, 2)) == [0, 2, 3, 5]
    assert run_bounds(slots(6), slots(0)) == [0, 1]
    assert run_bounds(slots(1, 2, 3), slots(5, 6, 7)) == [0, 3]
    assert run_bounds(slots(3, 2, 1), slots(5, 6, 7)) == [0, 1, 2, 3]


def test_a_run_has_no_jump_between_its_ends() -> None:
    pool = torch.zeros(8, 8, dtype=torch.uint8)
    assert Rows(pool, slots(3)).is_run
    assert Rows(pool, slots(3, 4, 5, 6)).is_run
    assert not Rows(pool, slots(3, 5, 4, 6)).is_run
    assert not Rows(pool, slots(3, 5)).is_run
    assert not Rows(pool, slots(3, 3, 5)).is_run
    assert Rows(pool, slots(3, 4)).run.data_ptr() == pool[3].data_ptr()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (slots(-1), slots(2), r"source slots within 0\.\.6, got \[-1\]"),
        (slots(1), slots(SLOTS), r"target slots within 0\.\.6, got \[7\]"),
        (slots(1, 2), slots(3), "as many targets as sources, got 1 and 2"),
        (slots(1, 2), slots(3, 3), "distinct target slots"),
        (slots(1, 2), slots(3, 2), r"both read and written: \[2\]"),
        (np.array([1]), slots(3), r"int32 \[n\], got int64"),
        (slots(1)[None], slots(3), r"got int32 \(1, 1\)"),
    ],
)
def test_wrong_slots_are_refused_before_anything_is_written(
    sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], message: str
) -> None:
    """-1 is a missing page; as an index it would be the last slot."""
    rig = tiered("cpu")
    rig.fill()
    before = rig.snapshot()
    with pytest.raises(ValueError, match=message):
        rig.storage.copy_slots(0, sources, targets)
    assert torch.equal(rig.snapshot()[0][0], before[0][0])


def test_slots_may_be_read_only() -> None:
    """Block tables are: what a view of one names is copied all the same."""
    rig = tiered("cpu")
    rig.fill()
    before = rig.snapshot()
    sources, targets = slots(0, 2, 1, 3), slots(6, 5, 4, 0)[:3]
    sources.flags.writeable = targets.flags.writeable = False
    rig.storage.copy_slots(0, sources[::-1][1:], targets)
    assert torch.equal(rig.snapshot()[0][0][[6, 5, 4]], before[0][0][[1, 2, 0]])


def test_tiers_have_separate_numberings() -> None:
    rig = tiered("cpu")
    rig.storage.demote_slots(0, slots(HOST + 1), slots(HOST - 1))
    rig.storage.demote_slots(0, slots(2), slots(2))
    with pytest.raises(ValueError, match=r"target slots within 0\.\.4, got \[6\]"):
        rig.storage.demote_slots(0, slots(2), slots(6))
    with pytest.raises(ValueError, match=r"host slots within 0\.\.4, got \[5\]"):
        rig.storage.onboard_slots(0, slots(5), slots(0))


@pytest.mark.gpu
def test_copies_are_ordered_between_the_stream_and_what_follows() -> None:
    """Everything written in the stream before is copied; what reads after needs no stream."""
    usable("cuda")
    plan = LayoutPlan.derive(
        [attention(0, ElementType.FLOAT32, num_kv_heads=64, head_dim=256)], tokens_per_block=64
    )
    storage = TorchStorage(plan, [SLOTS], "cuda", host_slots=[HOST])
    assert storage.host_pool_bytes(0, 0).is_pinned()
    kv = storage.kv(0)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for value in (1.0, 2.0):
        for _ in range(50):
            kv[3].add_(1.0)
        kv[3].fill_(value)
        storage.copy_slots(0, slots(3), slots(6))
        storage.demote_slots(0, slots(6, 3), slots(4, 1))
        host = storage.host_pool_bytes(0, 0).view(torch.float32)
        assert host[4].eq(value).all()
        kv[6].zero_()
        storage.onboard_slots(0, slots(4, 1), slots(0, 5))
        with torch.cuda.stream(other):
            assert bool(kv[0].eq(value).all())
            assert bool(kv[5].eq(value).all())
