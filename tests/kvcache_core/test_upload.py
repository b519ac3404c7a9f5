"""K38 and B38: a vector, or two small arrays together, go up from snapshots that outlive the
call.
"""

from __future__ import annotations

import pytest
import torch

from kvcache_core.storage.upload import (
    MAX_UPLOAD_BYTES,
    CopyQueue,
    HostCopies,
    PairUpload,
    VectorUpload,
)
from tests.support.deferred_copies import DeferredCopies
from tests.support.devices import DEVICES, usable

BIG = 1 << 40
"""Values over 32 bits show a copy that is half as wide as it should be."""


def pair(indices: list[int], mask: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(indices), torch.tensor(mask)


def made(queue: CopyQueue | None = None, device: str = "cpu") -> PairUpload:
    return PairUpload(*pair([0] * 3, [False] * 5), device, queue)


def test_k38_both_arrays_arrive() -> None:
    upload = made()
    assert upload.upload(*pair([BIG + 1, -2, 3], [True, False, True, True, False]))
    assert upload.first.tolist() == [BIG + 1, -2, 3]
    assert upload.second.tolist() == [True, False, True, True, False]


def test_b38_two_uploads_before_a_sync_keep_both_values() -> None:
    """With one snapshot the second upload would overwrite what the first has not sent yet."""
    queue = DeferredCopies()
    upload = made(queue)
    seen: list[tuple[list[int], list[bool]]] = []
    first, second = pair([BIG, BIG + 1, 2], [True] * 5)
    for step in range(3):
        first[0] = BIG + step
        second[step] = False
        assert upload.upload(first, second)
        queue.launch(lambda: seen.append((upload.first.tolist(), upload.second.tolist())))
    first.fill_(-1)
    assert upload.first.tolist() == [0, 0, 0], "nothing has run yet"
    assert upload.snapshots == 3
    queue.sync()
    assert [values[0] for values, _ in seen] == [BIG, BIG + 1, BIG + 2]
    assert [sum(mask) for _, mask in seen] == [4, 3, 2]


def test_k38_snapshots_are_reused_once_their_copy_is_complete() -> None:
    queue = DeferredCopies()
    upload = made(queue)
    for step in range(1, 9):
        assert upload.upload(*pair([step, 0, 0], [False] * 5))
        if step % 2 == 0:
            queue.sync()
            assert upload.first.tolist() == [step, 0, 0]
    assert upload.snapshots == 2


def test_k38_unchanged_values_are_not_written() -> None:
    queue = DeferredCopies()
    upload = made(queue)
    assert upload.upload(*pair([0] * 3, [False] * 5))
    assert not queue.work, "targets start as zeros"
    assert upload.upload(*pair([BIG, 0, 0], [False] * 5))
    assert upload.upload(*pair([BIG, 0, 0], [False] * 5))
    assert len(queue.work) == 1
    assert upload.upload(*pair([BIG, 0, 0], [True] * 5))
    assert len(queue.work) == 2


def test_k38_what_does_not_qualify_is_left_to_the_caller() -> None:
    upload = made()
    good = pair([1, 2, 3], [True] * 5)
    strided = torch.arange(6)[::2]
    for bad in (torch.tensor([1, 2]), good[0].int(), strided, torch.tensor([[1, 2, 3]])):
        assert not upload.upload(bad, good[1])
        assert not upload.upload(good[0], bad)
    assert upload.first.tolist() == [0, 0, 0]
    assert upload.second.tolist() == [False] * 5
    assert upload.snapshots == 0


def test_k38_after_a_refusal_nothing_is_taken_for_unchanged() -> None:
    """The caller has written the targets itself, with other values."""
    upload = made()
    values = pair([1, 2, 3], [True] * 5)
    assert upload.upload(*values)
    assert not upload.upload(values[0].int(), values[1])
    upload.first.fill_(9)
    assert upload.upload(*values)
    assert upload.first.tolist() == [1, 2, 3]


def test_k38_more_than_4_kib_is_refused() -> None:
    fits = torch.arange(MAX_UPLOAD_BYTES // 8 - 2), torch.ones(2, dtype=torch.int64)
    upload = PairUpload(*fits)
    assert upload.upload(*fits)
    assert torch.equal(upload.first, fits[0])
    longer = torch.arange(MAX_UPLOAD_BYTES // 8 - 1), torch.ones(2, dtype=torch.int64)
    upload = PairUpload(*longer)
    assert not upload.upload(*longer)
    assert upload.first.sum() == 0
    assert upload.first.shape == longer[0].shape


def test_k38_any_host_memory_qualifies_on_the_cpu() -> None:
    assert HostCopies().accepts(torch.zeros(1))
    assert not HostCopies().accepts(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
def test_b38_uploads_on_the_device_itself(device: str) -> None:
    upload = made(device=usable(device))
    results = []
    first, second = pair([0] * 3, [False] * 5)
    if device == "cuda":
        assert not upload.upload(*pair([1, 2, 3], [True] * 5)), "pageable memory"
        first, second = first.pin_memory(), second.pin_memory()
    for step in range(1, 40):
        first.fill_(BIG + step)
        second[step % 5] = not second[step % 5]
        assert upload.upload(first, second)
        results.append((upload.first + 0, upload.second.clone()))
    for step, (values, _) in enumerate(results, start=1):
        assert values.tolist() == [BIG + step] * 3
    assert results[0][1].tolist() == [False, True, False, False, False]


def test_b38_a_vector_keeps_the_values_of_every_queued_upload() -> None:
    """As many as are queued, each of any length; the snapshots serve again afterwards."""
    queue = DeferredCopies()
    upload = VectorUpload(torch.arange(5000) + BIG, torch.device("cpu"), queue)
    seen: list[tuple[int, int]] = []
    for step in range(1, 4):
        upload.host().copy_(torch.arange(5000) + BIG + step)
        upload.send()
        queue.launch(lambda: seen.append((int(upload.vector[0]), int(upload.vector[-1]))))
    upload.host().fill_(-1)
    assert upload.vector[0] == BIG, "nothing has run yet"
    queue.sync()
    assert seen == [(BIG + step, BIG + step + 4999) for step in (1, 2, 3)]
    upload.send()
    queue.sync()
    assert set(upload.vector.tolist()) == {-1}
    assert upload.snapshots <= 4


def test_b38_nothing_is_sent_twice() -> None:
    upload = VectorUpload(torch.arange(4), torch.device("cpu"))
    upload.host().fill_(7)
    assert upload.vector.tolist() == [0, 1, 2, 3]
    upload.send()
    assert upload.vector.tolist() == [7] * 4
    with pytest.raises(ValueError, match=r"expected host\(\) to be filled"):
        upload.send()


@pytest.mark.parametrize("device", DEVICES)
def test_b38_vectors_on_the_device_itself(device: str) -> None:
    upload = VectorUpload(torch.full((3000,), BIG), torch.device(usable(device)))
    results = []
    if device == "cuda":
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    for step in range(20):
        upload.host().fill_(BIG + step)
        upload.send()
        results.append(upload.vector + 0)
    for step, found in enumerate(results):
        assert (found == BIG + step).all()
