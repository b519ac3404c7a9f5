"""Who a peer is: an instance name plus the nonce of one boot.

A restarted worker keeps its name and gets a new nonce, so nothing cached about the old process
(endpoint, plan, compatibility verdict, binding) can be mistaken for the new one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from pydantic import Field
from typing_extensions import override

from transfer.wire import Message


class Incarnation(Message):
    """One boot of one instance; ``str()`` gives ``name@nonce``, as in logs and cache events."""

    instance: str
    nonce: str

    @classmethod
    def mint(cls, instance: str) -> Incarnation:
        """A new incarnation of ``instance`` with a random 64-bit nonce."""
        return cls(instance=instance, nonce=secrets.token_hex(8))

    @override
    def __str__(self) -> str:
        return f"{self.instance}@{self.nonce}"


@dataclass(frozen=True, slots=True)
class RankId:
    """One rank of one incarnation; ``str()`` gives ``name@nonce/rank``."""

    incarnation: Incarnation
    rank: int

    @override
    def __str__(self) -> str:
        return f"{self.incarnation}/{self.rank}"


class PeerAddress(Message):
    """Where a rank accepts control connections of other ranks."""

    incarnation: Incarnation
    rank: int = Field(default=0, ge=0, lt=1 << 31)
    host: str
    control_port: int = Field(ge=0, lt=1 << 16)

    @property
    def rank_id(self) -> RankId:
        """Who answers there."""
        return RankId(self.incarnation, self.rank)
