"""Which dp group each request comes to: the only queue in front of the groups.

A request is here until it lives in a group, and nowhere else; what is said about it meanwhile waits
for that. In order of arrival that is the same turn. Under KV-balanced admission it may wait for
room, a bounded number of rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Final

from kvcache_core.hashing import Prompt
from transfer.wire import FrameError, unpack_ints
from worker.admission_planner import AdmissionPlanner, Candidate, RankLoad
from worker.desk import Desk
from worker.dp_group import DpGroup
from worker.inbox import Command
from worker.kv_balance import in_order, plan_round, round_size
from worker.messages import Cancel, Generate, Leg, LegPlaced, Prefill, Stop, Warm
from worker.outbox import Outbox
from worker.requests import LegState

logger = logging.getLogger(__name__)

HAS_NO_PAGES: Final = frozenset(
    {
        LegState.AWAITING_GRANT,
        LegState.AWAITING_ROOM,
        LegState.GRANTED,
        LegState.LANDING,
        LegState.PULL_WAITING,
        LegState.PULLING,
    }
)


def load_of(desk: Desk) -> RankLoad:
    """A group as admission sees it: free pages, less what its requests have still to get."""
    waiting = sum(leg.prompt_tokens for leg in desk.legs if leg.state in HAS_NO_PAGES)
    for sequence in desk.sequences.values():
        capacity = 0 if sequence.cache is None else sequence.cache.capacity
        waiting += max(0, len(sequence.tokens) - capacity)
    free = desk.manager.block_counts().available * desk.demand.tokens_per_block
    return RankLoad(free - waiting, len(desk.legs))


@dataclass(eq=False, slots=True)
class _Waiting:
    connection: int
    message: Prefill | Generate
    tokens: int
    prompt: Prompt | None
    """None for tokens that cannot be read, which any group refuses."""
    skipped: int = 0

    @property
    def kind(self) -> Leg:
        return kind_of(self.message)


def kind_of(message: Prefill | Generate) -> Leg:
    """The leg that it asks for."""
    return "context" if isinstance(message, Prefill) else "generation"


class Placing:
    """The way of front ends to ``groups``. Used by the engine thread."""

    def __init__(
        self, groups: Values[DpGroup], outbox: Outbox, planner: AdmissionPlanner | None
    ) -> None:
        """Without a ``planner`` requests are placed in order of arrival."""
        self._groups = tuple(groups)
        self._outbox = outbox
        self._planner = planner
        self._queue: list[_Waiting] = []

    @property
    def waiting(self) -> int:
        """Requests that live nowhere yet."""
        return len(self._queue)

    def command(self, connection: int, message: Command) -> None:
        """Act on a message of a front end."""
        match message:
            case Prefill() | Generate() if len(self._groups) == 1:
                self._groups[0].intake.command(connection, message)
            case Prefill() | Generate():
                self._asked(connection, message)
            case Cancel() | Stop():
                self._settle([one for one in self._queue if _is_about(one, message.request_id)])
                for group in self._homes(message.request_id) or self._groups:
                    group.intake.command(connection, message)
            case Warm():
                for group in self._groups:
                    group.intake.command(connection, message)

    def connection_lost(self, connection: int) -> None:
        """Nobody waits for these requests any more."""
        self._queue = [one for one in self._queue if one.connection != connection]
        for group in self._groups:
            group.intake.connection_lost(connection)

    def place(self) -> None:
        """Give the queue's requests to groups, round after round, until one places nobody."""
        while self._queue:
            size = round_size(self._planner, [one.skipped for one in self._queue])
            head, rest = self._queue[:size], self._queue[size:]
            # What each lacks is looked up in every group: of these alone.
            plan, wrong = plan_round(self._planner, self._candidates(head), self._loads())
            if wrong:
                logger.warning("the plan of %s is not carried out: %s", self._planner, wrong)
            left = [one for one, rank in zip(head, plan, strict=True) if rank is None]
            self._queue = left + rest
            for one, rank in zip(head, plan, strict=True):
                if rank is not None:
                    self._enter(one, self._groups[rank])
            if len(left) == len(head):
                for one in left:
                    one.skipped += 1
                return

    def _asked(self, connection: int, message: Prefill | Generate) -> None:
        kind = kind_of(message)
        same = [one for one in self._queue if _is_about(one, message.request_id)]
        self._settle([one for one in same if one.kind == kind])
        for group in self._groups:
            if group.desk.legs.get(kind, message.request_id) is not None:
                group.intake.command(connection, message)  # which refuses it
                return
        try:
            tokens = unpack_ints(message.tokens)
        except FrameError:
            self._queue.append(_Waiting(connection, message, 0, None))
            return
        prompt = self._groups[0].desk.manager.prompt(message.scope, tokens)
        emitted = max((len(part) // 4 for part in message_emitted(message)), default=0)
        self._queue.append(_Waiting(connection, message, len(tokens) + emitted, prompt))

    def settle(self) -> None:
        """Place all that waits now, because nothing goes on any more."""
        self._settle(self._queue)

    def _settle(self, some: Values[_Waiting]) -> None:
        """Place these now, whatever the planner would say."""
        if not some:
            return
        self._queue = [one for one in self._queue if one not in some]
        for one, rank in zip(some, in_order(self._candidates(some), self._loads()), strict=True):
            self._enter(one, self._groups[rank])

    def _enter(self, one: _Waiting, group: DpGroup) -> None:
        if isinstance(one.message, Prefill):
            placed = LegPlaced(request_id=one.message.request_id, rank=group.number)
            self._outbox.placed(one.connection, placed)
        group.intake.command(one.connection, one.message)

    def _homes(self, request_id: str) -> list[DpGroup]:
        return [group for group in self._groups if group.desk.legs.of(request_id)]

    def _candidates(self, some: Values[_Waiting]) -> list[Candidate]:
        managers = [group.desk.manager for group in self._groups]
        return [
            Candidate(
                tuple(
                    one.tokens - (0 if one.prompt is None else manager.known_tokens(one.prompt))
                    for manager in managers
                ),
                one.skipped,
            )
            for one in some
        ]

    def _loads(self) -> list[RankLoad]:
        return [load_of(group.desk) for group in self._groups]


def message_emitted(message: Prefill | Generate) -> Values[bytes]:
    """Output tokens that are computed with the prompt."""
    return message.emitted if isinstance(message, Generate) else ()


def _is_about(one: _Waiting, request_id: str) -> bool:
    return one.message.request_id == request_id
