"""One leg of a request and its sequences: what the engine knows about them, and which changes of
state are possible.

A sequence is a list of tokens and the number of them whose KV is final. It computes what is
pending; when nothing is pending its logits are drawn from. A leg is this worker's part of a request
and ends exactly once. Both change state only along their transition tables; any other change raises
``InvalidTransition``.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from transfer.identity import Incarnation, PeerAddress
from transfer.lease import TransferLease
from worker.messages import Leg, PrefixSource, SamplingParams, StopRule
from worker.ports import CacheSequence
from worker.token_runs import FinishReason

Tokens = npt.NDArray[np.int32]


class InvalidTransition(RuntimeError):
    """A change of state that the tables do not allow: a bug of the engine."""


class SequenceState(Enum):
    """Where a sequence stands."""

    HELD = "held"
    """Waits for another sequence of its request to compute the prompt that they share."""
    QUEUED = "queued"
    """Waits for pages; holds none."""
    RUNNING = "running"
    """Holds pages and computes."""
    SUSPENDED = "suspended"
    """Its pages were given to older sequences; wants them back."""
    FINISHED = "finished"


SEQUENCE_TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.HELD: frozenset({SequenceState.QUEUED, SequenceState.FINISHED}),
    SequenceState.QUEUED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.SUSPENDED, SequenceState.FINISHED}),
    SequenceState.SUSPENDED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class LegState(Enum):
    """Where a leg stands. Both roles use one table; the roles enter at different states."""

    AWAITING_GRANT = "awaiting grant"
    """Context: computes nothing before the generation worker promised room."""
    AWAITING_ROOM = "awaiting room"
    """Generation: not granted yet."""
    GRANTED = "granted"
    """Generation: room is promised, no page allocated."""
    LANDING = "landing"
    """Generation: announced, waiting for pages."""
    RECEIVING = "receiving"
    """Generation: pages are being written by the peer."""
    PULL_WAITING = "pull waiting"
    """Context: queues for room before it asks another instance for a prefix."""
    PULLING = "pulling"
    """Context: asked for the prefix; room is set aside, no page allocated."""
    PULL_RECEIVING = "pull receiving"
    """Context: pages of the prefix are being written by the peer."""
    COMPUTING = "computing"
    """Its sequences are in the engine's hands."""
    HANDING_OFF = "handing off"
    """Context: everything is computed and shipped; waiting for the session to end."""
    ENDED = "ended"


LEG_TRANSITIONS: Final[dict[LegState, frozenset[LegState]]] = {
    LegState.AWAITING_GRANT: frozenset({LegState.PULL_WAITING, LegState.COMPUTING, LegState.ENDED}),
    LegState.PULL_WAITING: frozenset({LegState.PULLING, LegState.COMPUTING, LegState.ENDED}),
    LegState.PULLING: frozenset({LegState.PULL_RECEIVING, LegState.COMPUTING, LegState.ENDED}),
    LegState.PULL_RECEIVING: frozenset({LegState.COMPUTING, LegState.ENDED}),
    LegState.AWAITING_ROOM: frozenset({LegState.GRANTED, LegState.ENDED}),
    LegState.GRANTED: frozenset({LegState.LANDING, LegState.ENDED}),
    LegState.LANDING: frozenset({LegState.RECEIVING, LegState.ENDED}),
    LegState.RECEIVING: frozenset({LegState.COMPUTING, LegState.ENDED}),
    LegState.COMPUTING: frozenset({LegState.HANDING_OFF, LegState.ENDED}),
    LegState.HANDING_OFF: frozenset({LegState.ENDED}),
    LegState.ENDED: frozenset(),
}


class TokenList:
    """Growing int32 array. Views handed out stay valid as values but not as windows on later
    growth.
    """

    def __init__(self, *parts: Values[int] | Tokens) -> None:
        self._data: Tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
        self.length = len(self._data)
        """Tokens in the list, as ``len`` gives it."""

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> None:
        """Add one token; amortised O(1)."""
        if self.length == len(self._data):
            grown: Tokens = np.empty(max(16, 2 * self.length), dtype=np.int32)
            grown[: self.length] = self._data[: self.length]
            self._data = grown
        self._data[self.length] = token
        self.length += 1

    def span(self, start: int, end: int) -> Tokens:
        """Tokens ``[start, end)`` without a copy."""
        if not 0 <= start <= end <= self.length:
            raise IndexError(
                f"token span: expected 0 <= start <= end <= {self.length}, got {start}, {end}"
            )
        return self._data[start:end]


@dataclass(eq=False, slots=True)
class LegRecord:
    """A leg: the request as this worker got it, and how far it is."""

    kind: Leg
    request_id: str
    front_end: int
    """Connection that the request came by; its loss cancels the leg."""
    arrival: int
    prompt: Tokens
    scope: bytes
    sampling: SamplingParams
    stop: StopRule
    n: int
    deadline_at_ms: int
    output_limit: int
    """Output tokens at most: ``max_tokens``, or less where the sequence would get too long."""
    state: LegState
    destination: Incarnation | None = None
    source: PeerAddress | None = None
    prefix_source: PrefixSource | None = None
    """Context: where to fetch a prefix from before computing."""
    pull_id: str | None = None
    """Context: id of the session that fetches it."""
    open_choices: set[int] = field(default_factory=set)
    """Choices that need more tokens of this leg."""
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By key; only those that are not finished."""
    landing: CacheSequence | None = None
    """Pages that a peer writes, before they belong to a sequence or the prefix tree."""
    saving: tuple[int, ...] = ()
    """Slots per pool group that its grant counted on sharing with others."""
    passed_slots: int = 0
    """Slots that younger items got while it waited for a promise of room."""
    shipped_blocks: int = 0
    started: bool = False
    cached_tokens: int = 0
    prefill_tokens: int = 0
    transferred_bytes: int = 0

    def enter(self, state: LegState) -> None:
        """Change state. Raises InvalidTransition for a pair outside the table."""
        if state not in LEG_TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"{self.kind} leg of {self.request_id}: "
                f"{self.state.value} cannot become {state.value}"
            )
        self.state = state

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def uses_transfer(self) -> bool:
        """Whether pages travel for this leg, so that the agent has a session for it."""
        return self.destination is not None or self.source is not None

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Sessions that the agent may have for this leg: of its transfer, and of its pull."""
        own = (self.request_id,) if self.uses_transfer else ()
        return own if self.pull_id is None else (*own, self.pull_id)

    @property
    def ended(self) -> bool:
        """Whether its one terminal event was sent."""
        return self.state is LegState.ENDED


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of one choice, or of several choices that still share all of them."""

    key: int
    leg: LegRecord
    choices: tuple[int, ...]
    """Choices drawn from its next logits: several only while they share the prompt and nothing
    else.
    """
    tokens: TokenList
    state: SequenceState
    cache: CacheSequence | None = None
    holds_back: list[Sequence] = field(default_factory=list)
    """Held sequences that start once this one has computed the prompt or is gone."""
    last_step: int = 0
    passed_slots: int = 0
    """Slots that younger items got while it was queued."""
    snapshot_points: tuple[int, ...] = ()
    """Lengths, ascending, at which its state is to be kept; those passed are gone."""
    uncached_tokens: int | None = None
    """Tokens that it lacks: as its prompt was looked up, and exact once it was matched. None where
    nobody has looked, or where what was expected of others did not come.
    """
    demoted_steps: int = 0
    """Steps in which its prompt came after younger ones, or gave up the privilege of the oldest."""
    owed: tuple[int, ...] = ()
    """Slots per pool group that it still has to get, as of ``owed_at``."""
    owed_at: tuple[int, int, int] | None = None
    """Its blocks, capacity and choices then."""
    awaited_key: bytes | None = None
    """Key of the last block that it waits for, computed by another sequence."""
    wait_until_step: int | None = None
    """Number of the step at which it waits no longer, set by its first wait."""
    under_way: int = 0
    """Tokens that launched steps compute whose results were not taken."""
    draws_under_way: int = 0
    """Of those steps, the ones that draw for it. Their tokens count as pending, unknown as they
    are.
    """
    feed: int | None = None
    """Number of its draw among those of the step launched last, where it can go on from it without
    anybody having seen the token.
    """
    rebased: TransferLease | None = None
    """Pages that a step under way reads though the sequence uses others by now."""

    def enter(self, state: SequenceState) -> None:
        """Change state. Raises InvalidTransition for a pair outside the table."""
        if state not in SEQUENCE_TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"sequence {self.key} of {self.leg.request_id}: "
                f"{self.state.value} cannot become {state.value}"
            )
        self.state = state

    @property
    def arrival(self) -> tuple[int, int]:
        """Order of service: older requests first, then lower choices."""
        return (self.leg.arrival, self.choices[0])

    @property
    def computed(self) -> int:
        """Tokens with final KV."""
        return 0 if self.cache is None else self.cache.history

    @property
    def next_position(self) -> int:
        """The first token that no step has computed or computes."""
        return self.under_way if self.cache is None else self.cache.history + self.under_way

    @property
    def output_count(self) -> int:
        """Output tokens that it holds."""
        return len(self.tokens) - len(self.leg.prompt)

    def finish_of(self, token: int) -> FinishReason | None:
        """Whether ``token``, just drawn as the next output token, ends the choice. The last token
        counts as output.
        """
        leg = self.leg
        if token in leg.stop.stop_token_ids:
            return "stop"
        return "length" if self.output_count + 1 >= leg.output_limit else None
