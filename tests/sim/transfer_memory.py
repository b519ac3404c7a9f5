"""Pages with stamps: whose they are, what is in them, who leases them, who may still touch them.

Every touch of a page, by the engine or by a move, checks the stamps: a page that was freed, lent
anew or changed under a request that has not ended is found at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.lease import PageLease
from kvcache_core.ports import PageCopier, SlotArray
from tests.sim.transfer_network import Action, PostedEnd
from transfer.copy_plan import CopyPlan, Slots
from transfer.page_staging import PageStaging
from transfer.passes import PassOver
from transfer.transport import PageMemory

Place = tuple[int, int]
"""Pool group and slot."""


class Value(NamedTuple):
    """Content of one page: which tokens it was computed from, which block and layers it is of."""

    mark: int
    block: int
    part: str


class Buffer:
    """What is posted."""

    def read(self) -> list[Value]:
        raise NotImplementedError

    def write(self, values: list[Value]) -> None:
        raise NotImplementedError

    def posted(self, end: PostedEnd) -> None:
        """A request over it begins."""
        raise NotImplementedError


class StampedMemory(PageCopier, PageMemory):
    """Memory of one rank. ``parts`` names what lies in each pool, on all ranks alike."""

    def __init__(
        self,
        layout: LayoutPlan,
        parts: Mapping[tuple[int, int], str],
        staging: SimStaging | None,
    ) -> None:
        self._parts = parts
        self._pools = [len(group.slot_bytes) for group in layout.pool_groups]
        self._content: dict[tuple[int, int, int], Value] = {}
        self._owner: dict[Place, str] = {}
        self._leases: Counter[Place] = Counter()
        self._ends: dict[Place, list[PostedEnd]] = {}
        self._staging = staging
        if staging is not None:
            staging.memory = self
        self.writes = 0
        """Pages written by moves."""

    # The engine.

    def lend(self, owner: str, places: Iterable[Place]) -> None:
        """The manager has given these pages to ``owner`` to write."""
        for place in places:
            assert not self._leases[place], f"{place} was given to {owner} while leased"
            for end in self._ends.pop(place, ()):
                assert not end.touchable, f"{place} was given to {owner} while under way"
            self._owner[place] = owner

    def compute(self, owner: str, place: Place, mark: int, block: int) -> None:
        """The engine writes one block."""
        assert self._owner[place] == owner, f"{owner} computes {place} of {self._owner[place]}"
        pool_group, slot = place
        for pool in range(self._pools[pool_group]):
            self._content[pool_group, pool, slot] = self._value(pool_group, pool, mark, block)

    def holds(self, place: Place, mark: int, block: int) -> bool:
        """Whether all pages of a slot hold this block."""
        pool_group, slot = place
        return all(
            self._content.get((pool_group, pool, slot))
            == self._value(pool_group, pool, mark, block)
            for pool in range(self._pools[pool_group])
        )

    def _value(self, pool_group: int, pool: int, mark: int, block: int) -> Value:
        return Value(mark, block, self._parts[pool_group, pool])

    def leased(self, lease: PageLease) -> None:
        """The pages of a lease are pinned."""
        self._leases.update(_places_of(lease))

    def check_over(self, lease: PageLease) -> None:
        """Fails while a request may touch a page that no other lease pins."""
        for place in _places_of(lease):
            if self._leases[place] == 1:
                for end in self._ends.get(place, ()):
                    assert not end.touchable, f"the lease of {place} ended while under way"

    def released(self, lease: PageLease) -> None:
        """The pages are pinned no more."""
        self.check_over(lease)
        for place in _places_of(lease):
            assert self._leases[place] > 0, f"{place} was released more often than leased"
            self._leases[place] -= 1
            if not self._leases[place]:
                self._ends.pop(place, None)

    def is_doubtful(self, lease: PageLease) -> bool:
        """Whether a request over one of its pages was LOST."""
        return any(end.lost for place in _places_of(lease) for end in self._ends.get(place, ()))

    @override
    def copy_slots(self, pool_group: int, sources: SlotArray, targets: SlotArray) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for pool in range(self._pools[pool_group]):
                key = (pool_group, pool, source)
                if key in self._content:
                    self._content[pool_group, pool, target] = self._content[key]

    @override
    def demote_slots(self, pool_group: int, device_slots: SlotArray, host_slots: SlotArray) -> None:
        raise NotImplementedError

    @override
    def onboard_slots(
        self, pool_group: int, host_slots: SlotArray, device_slots: SlotArray
    ) -> None:
        raise NotImplementedError

    # The transfer.

    @property
    def staged(self) -> int:
        """Messages gathered or scattered."""
        return self._staging.passes if self._staging is not None else 0

    @property
    @override
    def staging(self) -> PageStaging | None:
        return self._staging

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> PageRun:
        slots = range(first_slot, first_slot + num_slots)
        return PageRun(self, [(pool_group, pool, slot) for slot in slots])

    def whole(self, pool_group: int, slots: Slots) -> PageRun:
        """All pages of these slots, pool by pool."""
        return PageRun(
            self,
            [
                (pool_group, pool, slot)
                for pool in range(self._pools[pool_group])
                for slot in slots.tolist()
            ],
        )

    def owner_of_leased(self, place: Place) -> str:
        """Whose page this is. Fails when no lease pins it."""
        assert self._leases[place], f"{place} is touched without a lease"
        return self._owner[place]

    def begin(self, place: Place, end: PostedEnd) -> None:
        """A request over the page begins."""
        self._ends.setdefault(place, []).append(end)

    def get(self, keys: Sequence[tuple[int, int, int]]) -> list[Value]:
        """Content of pages by (pool group, pool, slot)."""
        return [self._content[key] for key in keys]

    def put(self, keys: Sequence[tuple[int, int, int]], values: Sequence[Value]) -> None:
        """Fill pages."""
        for key, value in zip(keys, values, strict=True):
            assert self._parts[key[:2]] == value.part, f"page {key} got {value}"
            self._content[key] = value
            self.writes += 1


def _places_of(lease: PageLease) -> list[Place]:
    return [
        (pool_group, page) for pool_group, pages in lease.used_pages() for page in pages.tolist()
    ]


class PageRun(Buffer):
    """Pages as they were when the request was posted: owner, and for a sender the content."""

    def __init__(self, memory: StampedMemory, keys: list[tuple[int, int, int]]) -> None:
        self._memory = memory
        self._keys = keys
        self._places = [(key[0], key[2]) for key in keys]
        self._owners = [memory.owner_of_leased(place) for place in self._places]
        self._values: list[Value] | None = None

    @override
    def posted(self, end: PostedEnd) -> None:
        for place in self._places:
            self._memory.begin(place, end)
        if end.side == 0:
            self._values = self._memory.get(self._keys)

    @override
    def read(self) -> list[Value]:
        self._check()
        values = self._memory.get(self._keys)
        assert self._values in (None, values), f"{self._keys} changed while they were sent"
        return values

    @override
    def write(self, values: list[Value]) -> None:
        self._check()
        self._memory.put(self._keys, values)

    def _check(self) -> None:
        owners = [self._memory.owner_of_leased(place) for place in self._places]
        assert owners == self._owners, f"{self._keys} were touched after reuse"


@dataclass(eq=False)
class Message(Buffer):
    """A staging buffer; its size plays no part."""

    values: list[Value] = field(default_factory=list)
    ends: list[PostedEnd] = field(default_factory=list)
    in_pass: bool = False

    def __getitem__(self, part: slice) -> Message:
        return self

    @override
    def posted(self, end: PostedEnd) -> None:
        assert not self.in_pass, "a staging buffer was posted in the middle of a pass"
        self.ends.append(end)

    @override
    def read(self) -> list[Value]:
        return list(self.values)

    @override
    def write(self, values: list[Value]) -> None:
        self.values = list(values)

    def check_free(self) -> None:
        assert not any(end.touchable for end in self.ends), "a staging buffer was used twice"
        self.ends.clear()


class SimStaging(PageStaging):
    """Gathers and scatters values, one pass after the other. ``later`` calls back when a pass has
    taken its time: then it touches what it touches, and nobody may have taken that meanwhile.
    """

    def __init__(self, message_bytes: int, later: Callable[[Action], None]) -> None:
        self.memory: StampedMemory
        self.passes = 0
        self._message_bytes = message_bytes
        self._later = later

    @property
    @override
    def message_bytes(self) -> int:
        return self._message_bytes

    @override
    def message(self, size_bytes: int) -> Message:
        return Message()

    @override
    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: Message, over: PassOver
    ) -> None:
        run = self.memory.whole(pool_group, slots)
        self._pass(message, lambda: message.write(run.read()), over)

    @override
    def scatter(
        self, plan: CopyPlan, message: Message, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        run = self.memory.whole(pool_group, slots)
        self._pass(message, lambda: run.write(message.read()), over)

    def _pass(self, message: Message, copy: Action, over: PassOver) -> None:
        assert not message.in_pass, "two passes share a staging buffer"
        message.check_free()
        message.in_pass = True
        self.passes += 1

        def finish() -> None:
            message.check_free()
            message.in_pass = False
            copy()
            over("")

        self._later(finish)
