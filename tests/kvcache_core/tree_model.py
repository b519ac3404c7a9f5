"""A naive model of one layer group's prefix tree and tiers: dictionaries, lists and brute force.

Every question walks everything. Nothing is shared with the package but the block size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

Path = tuple[int, ...]
"""All tokens up to the end of a block: what names it."""


@dataclass(eq=False)
class Page:
    """Bytes of one block, on the device or on the host."""

    on_host: bool
    priority: int
    holders: int = 1
    node: Node | None = None
    cached_at: tuple[int, int] | None = None
    """(time, place in the batch) since when only the tree knows it."""


@dataclass(eq=False)
class Node:
    """A block in the tree."""

    path: Path
    page: Page


@dataclass(eq=False)
class Holder:
    """A sequence: its pages in order, and the block that it continues in the tree."""

    priority: int
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    pages: list[Page] = field(default_factory=list)
    tip: Node | None = None
    """None at the root."""
    has_own_tail: bool = False


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens in common."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


class TreeModel:
    """What the manager's tree and pools should be after each operation."""

    def __init__(self, size: int, device_slots: int, host_slots: int) -> None:
        self.size = size
        self.device_slots = device_slots
        self.host_slots = host_slots
        self.nodes: dict[Path, Node] = {}
        self.holders: list[Holder] = []
        self.seen: Counter[str] = Counter()
        self._time = 0

    # --- questions -------------------------------------------------------------------------

    def pages(self) -> list[Page]:
        """Every page there is, once."""
        held = [page for holder in self.holders for page in holder.pages]
        known = [node.page for node in self.nodes.values()]
        return list(dict.fromkeys(held + known))

    def free(self, *, on_host: bool) -> int:
        """Slots of a tier that have no page."""
        slots = self.host_slots if on_host else self.device_slots
        return slots - sum(page.on_host == on_host for page in self.pages())

    def queue(self, *, on_host: bool) -> list[Page]:
        """Cached pages of a tier, the next to lose first."""
        cached = [p for p in self.pages() if p.cached_at is not None and p.on_host == on_host]
        return sorted(cached, key=lambda page: (page.priority, page.cached_at))

    def longest(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix of ``tokens`` that some stored sequence begins with."""
        return max((common(path, tokens) for path in self.nodes), default=0)

    def can_serve(self, path: Path, tokens: Sequence[int], length: int) -> bool:
        """Whether a block is one of those in which a match of ``length`` tokens may end."""
        start = (length - 1) // self.size * self.size
        return path in self.nodes and start < len(path) and common(path, tokens) >= length

    # --- operations ------------------------------------------------------------------------

    def hold(self, holder: Holder, tokens: list[int], last: Path) -> None:
        """Hold the blocks of a match, the last of which is the block ``last``."""
        holder.tokens, holder.committed = list(tokens), len(tokens)
        holder.has_own_tail, holder.tip = False, None
        ends = list(range(self.size, len(tokens) + 1, self.size))
        paths = [tuple(tokens[:end]) for end in ends]
        if paths:
            holder.tip = self.nodes[paths[-1]]
        if len(tokens) % self.size:
            paths.append(last)
        holder.pages = [self.nodes[path].page for path in paths]
        for page in holder.pages:
            page.holders += 1
            page.cached_at = None
            page.priority = max(page.priority, holder.priority)

    def grow(self, holder: Holder, history: int, capacity: int) -> bool:
        """Pages for ``capacity`` tokens; what lies on the host comes back first."""
        first = history // self.size
        blocks = max(len(holder.pages), -(-capacity // self.size))
        read = range(min(first, len(holder.pages)))
        replaced = [index for index in read if holder.pages[index].on_host]
        if first < len(holder.pages) and not self._is_own(holder.pages[first]):
            replaced.append(first)
        need = len(replaced) + blocks - len(holder.pages)
        if need > self.free(on_host=False) + len(self.queue(on_host=False)):
            return False
        while self.free(on_host=False) < need:
            self._evict(need - self.free(on_host=False))
        old = {index: holder.pages[index] for index in replaced}
        for index, page in old.items():
            new = Page(on_host=False, priority=holder.priority)
            holder.pages[index] = new
            self.seen["onboarded"] += page.on_host
            self.seen["copied"] += not page.on_host
            if page.on_host and index < first and page.node is not None:
                self.seen["moved a page that another one holds"] += page.holders > 1
                new.node, page.node = page.node, None
                new.node.page = new
                new.priority = max(new.priority, page.priority)
        self._release([old[index] for index in reversed(replaced)])
        while len(holder.pages) < blocks:
            holder.pages.append(Page(on_host=False, priority=holder.priority))
        return True

    def commit(self, holder: Holder, tokens: Sequence[int]) -> None:
        """Verified tokens: whole blocks become blocks of the tree."""
        start = holder.committed // self.size
        holder.committed += len(tokens)
        holder.has_own_tail = holder.has_own_tail or bool(tokens)
        end = holder.committed // self.size
        if start == end:
            return
        holder.has_own_tail = holder.committed % self.size > 0
        if not self.publishes(holder):
            return
        is_first_new = True
        for index in range(start, end):
            path = tuple(holder.tokens[: (index + 1) * self.size])
            node, own = self.nodes.get(path), holder.pages[index]
            if node is None:
                holder.tip = self.nodes[path] = own.node = Node(path, own)
                if is_first_new:
                    self._drop_covered(path)
                is_first_new = False
                continue
            holder.tip = node
            if node.page.on_host:
                self.seen["rebased onto a page on the host"] += 1
                lost, node.page, own.node = node.page, own, node
                own.priority = max(own.priority, lost.priority)
                lost.node = lost.cached_at = None
            elif node.page is not own:
                self.seen["rebased"] += 1
                node.page.holders += 1
                node.page.cached_at = None
                node.page.priority = max(node.page.priority, own.priority)
                holder.pages[index] = node.page
                self._release([own])

    def end(self, holder: Holder) -> None:
        """Leave the partial last block to the tree and give all pages up."""
        full, rest = divmod(holder.committed, self.size)
        if rest and holder.has_own_tail and self.publishes(holder):
            path, page = tuple(holder.tokens[: holder.committed]), holder.pages[full]
            is_covered = any(other[: len(path)] == path for other in self.nodes)
            if not is_covered and page.holders == 1 and page.node is None:
                self.nodes[path] = page.node = Node(path, page)
                self._drop_covered(path)
        pages, holder.pages, holder.tip = holder.pages, [], None
        self._release(pages[::-1])

    def publishes(self, holder: Holder) -> bool:
        """Whether the block it continues is still the tree's."""
        tip = holder.tip
        return tip is None or self.nodes.get(tip.path) is tip

    # --- parts -----------------------------------------------------------------------------

    @staticmethod
    def _is_own(page: Page) -> bool:
        return page.holders == 1 and page.node is None and not page.on_host

    def _release(self, pages: Sequence[Page]) -> None:
        self._time += 1
        for place, page in enumerate(pages):
            page.holders -= 1
            if not page.holders and page.node is not None:
                page.cached_at = (self._time, place)

    def _drop_covered(self, path: Path) -> None:
        start = (len(path) - 1) // self.size * self.size
        for other in list(self.nodes):
            if start < len(other) < len(path) and path[: len(other)] == other:
                self._drop(other)

    def _drop(self, path: Path) -> None:
        """A block goes with all below it."""
        below = [other for other in self.nodes if other[: len(path)] == path]
        if len(path) % self.size:
            below = [path]
        self.seen["lost a branch"] += len(below) > 1
        self.seen["lost a branch in use"] += any(self.nodes[o].page.holders for o in below)
        for other in below:
            page = self.nodes.pop(other).page
            page.node = page.cached_at = None

    def _lose(self, pages: Sequence[Page]) -> None:
        for page in pages:
            if page.node is not None:
                self._drop(page.node.path)

    def _first(self, count: int, *, on_host: bool) -> list[Page]:
        """The next to lose, as far as they were cached together."""
        queue = self.queue(on_host=on_host)
        key = [(page.priority, page.cached_at[0]) for page in queue if page.cached_at]
        return [page for page, other in zip(queue, key, strict=True) if other == key[0]][:count]

    def _evict(self, count: int) -> None:
        victims = self._first(count, on_host=False)
        worth = victims[0].priority
        while self.free(on_host=True) < len(victims) and self.queue(on_host=True):
            missing = len(victims) - self.free(on_host=True)
            coldest = self._first(missing, on_host=True)
            if coldest[0].priority > worth:
                break
            self._lose(coldest)
            victims = [page for page in victims if page.cached_at is not None]
        room = min(len(victims), self.free(on_host=True))
        demoted = victims[len(victims) - room :]
        if demoted:
            self._time += 1
        for place, page in enumerate(demoted):
            self.seen["demoted"] += 1
            page.on_host, page.cached_at = True, (self._time, place)
        self._lose([page for page in victims[: len(victims) - room] if page.node is not None])
