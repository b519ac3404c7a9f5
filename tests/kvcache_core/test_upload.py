"""K38 and B38: two small arrays go up together, from snapshots that outlive the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from typing_extensions import override

from kvcache_core.storage.upload import (
    MAX_UPLOAD_BYTES,
    CopyQueue,
    HostCopies,
    PairUpload,
    PendingCopy,
)
from tests.support.devices import DEVICES, usable

BIG = 1 << 40
"""Values over 32 bits show a copy that is half as wide as it should be."""


class Ticket(PendingCopy):
    done = False

    @override
    def is_complete(self) -> bool:
        return self.done


class DeferredCopies(CopyQueue):
    """A stream that runs nothing before ``sync``, like a device that is far behind."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], object], Ticket]] = []

    @override
    def snapshot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @override
    def accepts(self, source: torch.Tensor) -> bool:
        return True

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        ticket = Ticket()
        self.work.append((lambda: target.copy_(source), ticket))
        return ticket

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel behind the copies."""
        self.work.append((kernel, Ticket()))

    def sync(self) -> None:
        for work, ticket in self.work:
            work()
            ticket.done = True
        self.work.clear()


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
