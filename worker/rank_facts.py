"""What a follower tells the leader: that it is there, what its tables looked like, and how its part
of each transfer goes. The leader alone decides what follows.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from transfer.identity import Incarnation, PeerAddress
from transfer.messages import HandoffData
from transfer.wire import Codec, Message
from worker.oplog import StepChecksum

Word = Literal["granted", "announced", "pull", "found", "handed_off", "no_decode"]
"""What a rank's transfer of a request has come to; one for each agent event that the engine waits
for.
"""


class RankHello(Message):
    """The first message: the rank has its part of the model and listens to peers."""

    kind: Literal["hello"] = "hello"
    rank: int
    peer: PeerAddress


class RankProgress(Message):
    """The agent of this rank reported ``word``."""

    kind: Literal["progress"] = "progress"
    request_id: str
    word: Word


class RankEnded(Message):
    """``SessionEnded`` on this rank."""

    kind: Literal["ended"] = "ended"
    request_id: str
    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: str
    transferred_bytes: int
    transferred_blocks: int


class RankLeaseEnded(Message):
    """Nothing touches this rank's pages of the lease any more."""

    kind: Literal["lease_ended"] = "lease_ended"
    lease: int


class RankLeaseInDoubt(Message):
    """A lost peer may still touch this rank's pages of the lease."""

    kind: Literal["lease_in_doubt"] = "lease_in_doubt"
    lease: int
    reason: str


class RankGranted(Message):
    """``GrantReceived``."""

    kind: Literal["granted"] = "granted"
    request_id: str
    generation: Incarnation


class RankAsked(Message):
    """``PullReceived``."""

    kind: Literal["asked"] = "asked"
    request_id: str
    puller: Incarnation
    scope: bytes
    tokens: bytes
    least_blocks: int


class RankFound(Message):
    """``PrefixFoundReceived``."""

    kind: Literal["found"] = "found"
    request_id: str
    end_block: int


class RankHandedOff(Message):
    """``HandoffReceived``."""

    kind: Literal["handed_off"] = "handed_off"
    request_id: str
    data: HandoffData | None


RankFact = RankProgress | RankEnded | RankLeaseEnded | RankLeaseInDoubt
"""About a transfer."""
GroupFact = RankFact | RankGranted | RankAsked | RankFound | RankHandedOff
"""The same from a rank that is a dp group: what it says is the whole of it."""

FollowerMessage = Annotated[RankHello | StepChecksum | GroupFact, Field(discriminator="kind")]
FACTS_CODEC: Codec[RankHello | StepChecksum | GroupFact] = Codec(FollowerMessage)
"""Follower to leader."""
