"""Who a peer is: an instance name plus the nonce of one boot.

A restarted worker keeps its name and gets a new nonce, so nothing cached about the old process
(endpoint, plan, compatibility verdict, binding) can be mistaken for the new one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
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


class RankPort(Message):
    """Where a follower accepts control connections."""

    host: str
    control_port: int = Field(ge=0, lt=1 << 16)


class PeerAddress(Message):
    """Where a rank accepts control connections of other ranks. A leader's tells of its followers
    too.
    """

    incarnation: Incarnation
    rank: int = Field(default=0, ge=0, lt=1 << 31)
    host: str
    control_port: int = Field(ge=0, lt=1 << 16)
    followers: tuple[RankPort, ...] = ()
    """Of ranks 1, 2, ... of the incarnation."""

    def leading(self, followers: Sequence[PeerAddress]) -> PeerAddress:
        """This leader's address with those of its followers, in order of ranks."""
        ports = tuple(
            RankPort(host=peer.host, control_port=peer.control_port) for peer in followers
        )
        return self.model_copy(update={"followers": ports})

    @property
    def ranks(self) -> tuple[PeerAddress, ...]:
        """The addresses of all ranks of the instance."""
        return (
            self.model_copy(update={"followers": ()}),
            *(
                PeerAddress(
                    incarnation=self.incarnation,
                    rank=rank,
                    host=port.host,
                    control_port=port.control_port,
                )
                for rank, port in enumerate(self.followers, start=1)
            ),
        )

    @property
    def rank_id(self) -> RankId:
        """Who answers there."""
        return RankId(self.incarnation, self.rank)
