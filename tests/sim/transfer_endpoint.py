"""Posted requests of one end of a link, as pairs make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from typing_extensions import override

from tests.sim.transfer_memory import Buffer, Message
from tests.sim.transfer_network import Link, PostedEnd
from tests.sim.transfer_process import CONTEXT, Process
from transfer.outcome import PostStatus
from transfer.transport import Completion, Ended, Endpoint, Lost, PostedRequest


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
    """One end of a link."""

    def __init__(self, link: Link, process: Process, doubted: Callable[[], None]) -> None:
        self._link = link
        self._process = process
        self._doubted = doubted

    @property
    @override
    def alive(self) -> bool:
        return self._link.open[self._process.side]

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
        process = self._process

        def told(status: PostStatus) -> None:
            process.run(partial(tell, status))

        def tell(status: PostStatus) -> None:
            ended(Completion(status))
            if status is PostStatus.LOST and isinstance(buffer, Message):
                self._doubted()

        def touch(other: PostedEnd) -> None:
            if process.side == CONTEXT:
                end.content = buffer.read()
            else:
                assert isinstance(other.content, list)
                buffer.write(other.content)

        def reaches() -> bool:
            return process.alive and not self._link.torn_down[process.side]

        end = PostedEnd(process.side, touch, told, reaches)
        buffer.posted(end)
        self._link.post(tag, end)
        return SimRequest()
