"""Inputs of a session beside the messages of its peer, which are events themselves.

The shell delivers each with the current time: ``session.handle(event, now_ms)``. Every ``Post`` of
a ``PostSends`` or ``PostReceives`` gets exactly one ``PostEnded``, also after the peer is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.lease import LeasedBlocks
from transfer.messages import HandoffData, ToContext, ToGeneration, ToPuller, ToSource
from transfer.outcome import PeerFate, PostStatus
from transfer.prefix import Prefix


@dataclass(frozen=True, slots=True)
class GrantRequested:
    """Generation: grant ``prompt_tokens`` to the context rank, as do all ``receivers`` of this
    instance; everything must be over in ``deadline_ms``.
    """

    prompt_tokens: int
    deadline_ms: int
    receivers: int = 1


@dataclass(frozen=True, slots=True)
class PullRequested:
    """Puller: ask for ``prefix``, as do all ``receivers`` of this instance; everything must be over
    in ``deadline_ms``.
    """

    prefix: Prefix
    least_blocks: int
    deadline_ms: int
    receivers: int = 1


@dataclass(frozen=True, slots=True)
class FoundRequested:
    """Source: blocks up to ``end_block`` of the prefix are leased and will be shipped."""

    end_block: int


@dataclass(frozen=True, slots=True)
class DeclineRequested:
    """Source: the prefix is not here, or not served now."""

    reason: str


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Generation: these pages are to be filled, up to ``end_block``."""

    end_block: int
    blocks: LeasedBlocks


@dataclass(frozen=True, slots=True)
class AnnounceRequested:
    """Context: the first chunk is about to run."""


@dataclass(frozen=True, slots=True)
class ShipRequested:
    """Context: KV of blocks ``[first_block, end_block)`` is final. Consecutive, from block 0."""

    first_block: int
    end_block: int
    blocks: LeasedBlocks


@dataclass(frozen=True, slots=True)
class HandOffRequested:
    """Context: the first tokens are sampled and every block was given to ``ShipRequested``. Only
    the leader has the data.
    """

    data: HandoffData | None


@dataclass(frozen=True, slots=True)
class NoDecodeRequested:
    """Context: the first token ended the request."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Either side: the request is not wanted any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class FailureReported:
    """Either side: this worker cannot go on with the request."""

    reason: str


@dataclass(frozen=True, slots=True)
class PostEnded:
    """The posted send or receive ``post`` ended."""

    post: int
    status: PostStatus


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to the peer is gone and its data endpoint closed. Posts that were open still
    end one by one.
    """

    reason: str
    fate: PeerFate


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The peer's process is known dead and its data endpoint closed: nothing of it touches our
    memory any more.
    """


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time of the last ``ArmDeadline`` has come."""

    ahead_ms: int = 0
    """When a post of the pair that was made before the session's own open ones last ended."""


ContextEvent = (
    ToContext
    | AnnounceRequested
    | ShipRequested
    | HandOffRequested
    | NoDecodeRequested
    | CancelRequested
    | FailureReported
    | PostEnded
    | PeerLost
    | PeerDied
    | DeadlinePassed
)
GenerationEvent = (
    ToGeneration
    | GrantRequested
    | PagesReady
    | CancelRequested
    | FailureReported
    | PostEnded
    | PeerLost
    | PeerDied
    | DeadlinePassed
)
SourceEvent = (
    ToSource
    | FoundRequested
    | ShipRequested
    | HandOffRequested
    | DeclineRequested
    | CancelRequested
    | FailureReported
    | PostEnded
    | PeerLost
    | PeerDied
    | DeadlinePassed
)
PullerEvent = (
    ToPuller
    | PullRequested
    | PagesReady
    | CancelRequested
    | FailureReported
    | PostEnded
    | PeerLost
    | PeerDied
    | DeadlinePassed
)
