"""Requests as scripts, and the processes that run them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.transfer_network import Link
from tests.sim.transfer_pages import Pages, Sequence
from transfer.agent_events import SessionEnded
from transfer.identity import Incarnation
from transfer.pair_posts import PairPosts
from transfer.pending import EndedSessions, PendingCancels
from transfer.session import Session


@dataclass
class Script:
    """One request: what the engines do with it."""

    prompt_blocks: int
    cached_blocks: int = 0
    """On the generation rank."""
    chunk_blocks: int = 2
    chunk_ms: int = 30
    deadline_ms: int = 20_000
    no_decode: bool = False
    deeds: tuple[tuple[int, int, str], ...] = ()
    """(side, milliseconds after the start, "cancel" or "fail")."""


@dataclass(eq=False)
class Rank:
    """One process."""

    side: int
    incarnation: Incarnation
    pages: Pages
    alive: bool = True
    paused_until_ms: int = 0
    sessions: dict[str, Session] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    """By session id."""
    posts: dict[Link, PairPosts] = field(default_factory=dict)
    session_of: dict[str, str] = field(default_factory=dict)
    """By request id; ids of sessions that are over stay."""
    armed: dict[str, int] = field(default_factory=dict)
    cancels: PendingCancels = field(default_factory=PendingCancels)
    ended: EndedSessions = field(default_factory=EndedSessions)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    outcomes: dict[str, SessionEnded] = field(default_factory=dict)
    ended_ms: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.incarnation.instance

    def session(self, request_id: str) -> Session | None:
        return self.sessions.get(self.session_of.get(request_id, ""))
