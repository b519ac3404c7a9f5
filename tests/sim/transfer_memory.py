"""The real queue of posts over fake pages and a virtual network: memory, staging, endpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from tests.sim.transfer_network import Link, PostedEnd
from tests.sim.transfer_pages import PLAN, Pages, Place, Value
from transfer.copy_plan import CopyPlan, Slots
from transfer.outcome import PostStatus
from transfer.page_staging import PageStaging
from transfer.passes import PassOver
from transfer.transport import Completion, Ended, Endpoint, Lost, PageMemory, PostedRequest


class Buffer:
    """What is posted."""

    posted: int = 0
    """Requests over it that have not ended."""
    in_pass: bool = False
    """A pass reads or writes it."""
    lost: bool = False
    """A request over it was LOST: the peer may touch it for ever."""

    def read(self) -> list[Value]:
        raise NotImplementedError

    def write(self, values: list[Value]) -> None:
        raise NotImplementedError


class PageRun(Buffer):
    """Slots of one pool, which stay whose they are while a request is under way."""

    def __init__(self, pages: Pages, places: list[Place]) -> None:
        self._pages = pages
        self._places = places
        self._owners = [pages.owner_of(group, slot) for group, _, slot in places]

    @override
    def read(self) -> list[Value]:
        self._check()
        return self._pages.read(self._places)

    @override
    def write(self, values: list[Value]) -> None:
        self._check()
        self._pages.write(self._places, values)

    def _check(self) -> None:
        owners = [self._pages.owner_of(group, slot) for group, _, slot in self._places]
        assert owners == self._owners, f"{self._places} were touched after reuse"


@dataclass(eq=False)
class Message(Buffer):
    """A staging buffer; its size plays no part."""

    values: list[Value] = field(default_factory=list)

    def __getitem__(self, part: slice) -> Message:
        return self

    @override
    def read(self) -> list[Value]:
        return list(self.values)

    @override
    def write(self, values: list[Value]) -> None:
        self.values = list(values)

    def check_free(self) -> None:
        assert not self.posted, "a staging buffer was used while a request was under way"
        assert not self.lost, "a staging buffer in doubt was used again"


class SimStaging(PageStaging):
    """Gathers and scatters values. ``later`` calls back when a pass has taken its time: then it
    touches what it touches, and nobody may have taken that meanwhile.
    """

    def __init__(self, pages: Pages, later: Callable[[Callable[[], None]], None]) -> None:
        self._pages = pages
        self._later = later
        self.messages: list[Message] = []

    @property
    @override
    def message_bytes(self) -> int:
        return PLAN.message_bytes

    @override
    def message(self, size_bytes: int) -> Message:
        self.messages.append(Message())
        return self.messages[-1]

    @override
    def gather(
        self, plan: CopyPlan, pool_group: int, slots: Slots, message: Message, over: PassOver
    ) -> None:
        run = PageRun(self._pages, _places(pool_group, slots))
        self._pass(message, lambda: message.write(run.read()), over)

    @override
    def scatter(
        self, plan: CopyPlan, message: Message, pool_group: int, slots: Slots, over: PassOver
    ) -> None:
        run = PageRun(self._pages, _places(pool_group, slots))
        self._pass(message, lambda: run.write(message.read()), over)

    def _pass(self, message: Message, copy: Callable[[], None], over: PassOver) -> None:
        assert not message.in_pass, "two passes share a staging buffer"
        message.check_free()
        message.in_pass = True

        def finish() -> None:
            message.check_free()
            message.in_pass = False
            copy()
            over("")

        self._later(finish)


def _places(pool_group: int, slots: Slots) -> list[Place]:
    pools = range(len(PLAN.groups[pool_group].sender.slot_bytes))
    return [(pool_group, pool, int(slot)) for pool in pools for slot in slots]


class SimMemory(PageMemory):
    """Pages of one rank."""

    def __init__(self, pages: Pages, later: Callable[[Callable[[], None]], None]) -> None:
        self._pages = pages
        self._staging = SimStaging(pages, later)

    @property
    @override
    def staging(self) -> PageStaging | None:
        return self._staging

    @override
    def region(self, pool_group: int, pool: int, first_slot: int, num_slots: int) -> object:
        slots = range(first_slot, first_slot + num_slots)
        return PageRun(self._pages, [(pool_group, pool, slot) for slot in slots])


class SimRequest(PostedRequest):
    """Nobody looks at it."""

    @property
    @override
    def ended(self) -> bool:
        raise NotImplementedError

    @override
    def cancel(self) -> None:
        raise NotImplementedError


class SimEndpoint(Endpoint):
    """One end of a link. ``run`` calls back in the process of its rank, or never."""

    def __init__(self, link: Link, side: int, run: Callable[[Callable[[], None]], None]) -> None:
        self._link = link
        self._side = side
        self._run = run

    @property
    @override
    def alive(self) -> bool:
        return self._link.open[self._side]

    @property
    @override
    def lanes(self) -> tuple[str, ...]:
        return ()

    @override
    def on_lost(self, lost: Lost) -> None:
        raise NotImplementedError

    @override
    def post_send(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        return self._post(buffer, tag, ended)

    @override
    def post_receive(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        return self._post(buffer, tag, ended)

    def _post(self, buffer: object, tag: int, ended: Ended) -> PostedRequest:
        assert isinstance(buffer, Buffer)
        assert not buffer.in_pass, "a staging buffer was posted in the middle of a pass"
        buffer.posted += 1

        def finish(status: PostStatus) -> None:
            buffer.posted -= 1
            buffer.lost = buffer.lost or status is PostStatus.LOST
            self._run(lambda: ended(Completion(status)))

        def touch(other: PostedEnd) -> None:
            if self._side == 0:
                end.content = buffer.read()
            else:
                assert isinstance(other.content, list)
                buffer.write(other.content)

        end = PostedEnd(
            side=self._side,
            touch=touch,
            done=partial(finish, PostStatus.DONE),
            revoked=partial(finish, PostStatus.REVOKED),
            lost=partial(finish, PostStatus.LOST),
        )
        self._link.post(tag, end)
        return SimRequest()
