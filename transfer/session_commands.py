"""Outputs of a session, to be carried out by the shell in the order given."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.agent_events import AgentEvent
from transfer.messages import SessionMessage
from transfer.region import Post


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send on the peer's control connection; dropped silently when that connection is gone."""

    message: SessionMessage


@dataclass(frozen=True, slots=True)
class PostSends:
    """Post these sends in order, all with ``tag``, behind those of earlier commands. The
    ``ChunkSent`` that tells of them follows; a staged one is gathered when its turn comes.
    """

    tag: int
    posts: tuple[Post, ...]


@dataclass(frozen=True, slots=True)
class PostReceives:
    """Post these receives in order on the peer's own endpoint, all with ``tag``, behind those of
    earlier commands. A staged one has ended when its bytes are in the pages.
    """

    tag: int
    posts: tuple[Post, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Hand to the engine."""

    event: AgentEvent


@dataclass(frozen=True, slots=True)
class ArmDeadline:
    """Deliver ``DeadlinePassed`` at ``at_ms``; replaces the session's earlier deadline."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close the peer's connection and data endpoint; its sessions then get ``PeerLost``."""

    reason: str


Command = SendControl | PostSends | PostReceives | Report | ArmDeadline | DropPeer
