"""What followers do about transfers, as operations of the log: the leader's verbs for its own
agent, told to every rank's. Leases go by the names that the log gave them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from transfer.identity import PeerAddress
from transfer.messages import HandoffData
from transfer.wire import Message


class GrantTransfer(Message):
    """``TransferAgent.grant``."""

    kind: Literal["grant_transfer"] = "grant_transfer"
    request_id: str
    sources: tuple[PeerAddress, ...]
    prompt_tokens: int
    deadline_ms: int


class ReadyTransfer(Message):
    """``TransferAgent.ready``."""

    kind: Literal["ready_transfer"] = "ready_transfer"
    request_id: str
    first_block: int
    end_block: int
    lease: int


class AnnounceTransfer(Message):
    """``TransferAgent.announce``."""

    kind: Literal["announce_transfer"] = "announce_transfer"
    request_id: str


class ShipTransfer(Message):
    """``TransferAgent.ship``."""

    kind: Literal["ship_transfer"] = "ship_transfer"
    request_id: str
    first_block: int
    end_block: int
    lease: int


class HandOffTransfer(Message):
    """``TransferAgent.hand_off_pages``: the leader alone hands off first tokens."""

    kind: Literal["hand_off_transfer"] = "hand_off_transfer"
    request_id: str


class HandOffTokens(Message):
    """``TransferAgent.hand_off`` of a rank that leads a dp group."""

    kind: Literal["hand_off_tokens"] = "hand_off_tokens"
    request_id: str
    data: HandoffData


class NoDecodeTransfer(Message):
    """``TransferAgent.no_decode``."""

    kind: Literal["no_decode_transfer"] = "no_decode_transfer"
    request_id: str


class PullTransfer(Message):
    """``TransferAgent.pull``."""

    kind: Literal["pull_transfer"] = "pull_transfer"
    request_id: str
    sources: tuple[PeerAddress, ...]
    scope: bytes
    tokens: bytes
    least_blocks: int
    deadline_ms: int


class FoundTransfer(Message):
    """``TransferAgent.found``."""

    kind: Literal["found_transfer"] = "found_transfer"
    request_id: str
    end_block: int


class DeclineTransfer(Message):
    """``TransferAgent.decline``."""

    kind: Literal["decline_transfer"] = "decline_transfer"
    request_id: str
    reason: str


class CancelTransfer(Message):
    """``TransferAgent.cancel``."""

    kind: Literal["cancel_transfer"] = "cancel_transfer"
    request_id: str
    reason: str


class KeepWarm(Message):
    """``TransferAgent.keep_warm``."""

    kind: Literal["keep_warm"] = "keep_warm"
    peers: tuple[PeerAddress, ...]


TransferOperation = Annotated[
    GrantTransfer
    | ReadyTransfer
    | AnnounceTransfer
    | ShipTransfer
    | HandOffTransfer
    | HandOffTokens
    | NoDecodeTransfer
    | PullTransfer
    | FoundTransfer
    | DeclineTransfer
    | CancelTransfer
    | KeepWarm,
    Field(discriminator="kind"),
]
