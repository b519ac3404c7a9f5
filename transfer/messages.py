"""Control messages between a generation rank and a context rank, multiplexed over one connection a
pair.

The generation rank dials. Handshake: ``Challenge`` / ``Hello`` / ``Welcome`` prove the cluster
token both ways, then each side sends ``Introduction`` and checks the other's facts before any
session starts. A session is one request between one context and one generation rank; its messages
are ordered, and each side speaks a last word exactly once: the context one of ``Handoff, NoDecode,
SenderFailed, CancelSession``, the generation one of ``Received, CancelSession``. After the
context's last word no ``ChunkSent`` follows, so the receiver knows when nothing more will be
written to its pages. Page data never enters this codec; slot lists travel as packed int32.

A prefix pull is such a session with another opening: ``Pull`` and ``PrefixFound`` in place of
``Grant`` and ``Announce``, and ``PullDeclined`` in place of ``NoDecode``. Any two ranks may have
one; the rank that pulls is the one that dials.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from transfer.identity import Incarnation
from transfer.rank_info import RankInfo
from transfer.wire import Codec, Message

FinishReason = Literal["stop", "length"]
Tag = Annotated[int, Field(ge=0, lt=1 << 64)]
Block = Annotated[int, Field(ge=0, lt=1 << 31)]
"""As the other numbers, bounded: both ends calculate with what a peer says."""
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Milliseconds = Annotated[int, Field(ge=1, lt=1 << 53)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Challenge(Message):
    """First message of the accepting (context) side: a nonce to prove the cluster token with."""

    kind: Literal["challenge"] = "challenge"
    nonce: bytes


class Hello(Message):
    """Answer of the dialling side: ``auth.proof(token, b"generation", challenge nonce)`` and its
    own nonce.
    """

    kind: Literal["hello"] = "hello"
    proof: bytes
    nonce: bytes


class Welcome(Message):
    """The accepting side proves the token too: ``auth.proof(token, b"context", hello nonce)``."""

    kind: Literal["welcome"] = "welcome"
    proof: bytes


class Introduction(Message):
    """Facts of the sending rank. Both sides send one after the proofs and run ``check_movable`` on
    what they get.
    """

    kind: Literal["introduction"] = "introduction"
    rank_info: RankInfo
    endpoint_nonce: bytes = b""
    """Set by the generation side: the first bytes it expects on the data endpoint that the context
    side opens.
    """
    meant_for: Incarnation | None = None
    """Set by the generation side, with ``meant_for_rank``: whom it dials. Another process that
    listens there now is not to take it for a new connection of its own.
    """
    meant_for_rank: Block = 0


class PeerRefused(Message):
    """The pair cannot work together; the connection is closed after this message."""

    kind: Literal["peer_refused"] = "peer_refused"
    reasons: tuple[str, ...]


class Heartbeat(Message):
    """Sent both ways on an idle connection; silence means that the peer is lost."""

    kind: Literal["heartbeat"] = "heartbeat"


class Grant(Message):
    """The generation rank promises room for the prompt. ``deadline_ms`` counts from receipt."""

    kind: Literal["grant"] = "grant"
    request_id: str
    session: str
    prompt_tokens: Count
    deadline_ms: Milliseconds
    receivers: Count = 1
    """Ranks of the generation instance that grant this request to this context rank."""


class Pull(Message):
    """A rank asks for the KV of a prefix that it would compute otherwise. Opens a session as
    ``Grant`` does. ``deadline_ms`` counts from receipt.
    """

    kind: Literal["pull"] = "pull"
    request_id: str
    """Of the pull, which is not that of the request it is for."""
    session: str
    scope: bytes
    tokens: bytes
    """The prefix, packed int32: whole blocks."""
    least_blocks: Count
    """With fewer blocks than this of the prefix the pull is not worth it."""
    deadline_ms: Milliseconds
    receivers: Count = 1
    """Ranks of the pulling instance that send this pull to this rank."""


class PrefixFound(Message):
    """Answer to ``Pull``: blocks up to ``end_block`` are here and stay; allocate pages now."""

    kind: Literal["prefix_found"] = "prefix_found"
    session: str
    end_block: Count


class PullDeclined(Message):
    """Last word of a rank that does not have what was pulled, or does not serve it now."""

    kind: Literal["pull_declined"] = "pull_declined"
    session: str
    reason: str


class Announce(Message):
    """The first chunk is about to run: allocate pages now."""

    kind: Literal["announce"] = "announce"
    session: str


class GroupSlots(Message):
    """Where one layer group's blocks ``first_block, first_block + 1, ...`` go. Slot -1: this block
    is not wanted.
    """

    first_block: Block
    slots: bytes
    """Packed int32, one receiver slot a block, up to the message's ``end_block``."""


class ReceiveReady(Message):
    """The receiver's pages, one entry a layer group of the pair's plan, in its order. Groups
    with nothing to receive have no slots.
    """

    kind: Literal["receive_ready"] = "receive_ready"
    session: str
    tag: Tag
    """Minted for this session: every page message of it carries this tag, in the order of
    ``ChunkSent``.
    """
    end_block: Block
    groups: tuple[GroupSlots, ...]


class GroupRuns(Message):
    """Runs of one layer group in one chunk: the wanted blocks of ``[first_block, end_block)`` in
    order, cut into runs.
    """

    first_block: Block
    end_block: Block
    run_blocks: bytes
    """Packed int32: blocks in each run. Unless they are staged, the slots of both sides are
    consecutive within a run.
    """
    staged: bool = False
    """Whether each run is gathered into one message, of at most the plan's ``message_bytes`` unless
    it is one block. Otherwise whole slots move, one message a run and pool.
    """


class ChunkSent(Message):
    """The sender posts these runs, group by group, run by run. Chunks count from 0."""

    kind: Literal["chunk_sent"] = "chunk_sent"
    session: str
    chunk: Block
    groups: tuple[GroupRuns, ...]


class HandoffLogprob(Message):
    """Log-probability of a first token and of the most likely alternatives, best first."""

    logprob: float
    top: tuple[tuple[Token, float], ...] = ()


class ChoiceHandoff(Message):
    """The first token of one choice; ``finish`` is set when it already ended that choice."""

    token: Token
    logprob: HandoffLogprob | None = None
    finish: FinishReason | None = None


class HandoffData(Message):
    """What decoding needs beside the pages: a value of the engine, carried unread."""

    choices: tuple[ChoiceHandoff, ...]
    cached_tokens: Block
    """Prompt tokens that the context worker found in its prefix tree."""


class Handoff(Message):
    """Last word of a context rank that did all it promised."""

    kind: Literal["handoff"] = "handoff"
    session: str
    data: HandoffData | None = None
    """What decoding needs; absent from all but the leader of the context ranks."""


class NoDecode(Message):
    """Last word: the first token ended every choice, nothing is to be decoded, free the pages
    unread.
    """

    kind: Literal["no_decode"] = "no_decode"
    session: str


class Received(Message):
    """Last word of a generation rank that has every byte and the handoff."""

    kind: Literal["received"] = "received"
    session: str


class CancelSession(Message):
    """Last word of a side that gives the session up. Answered in kind unless the other has had its
    last word.
    """

    kind: Literal["cancel_session"] = "cancel_session"
    session: str
    reason: str


class SenderFailed(Message):
    """Last word of a context rank that cannot deliver."""

    kind: Literal["sender_failed"] = "sender_failed"
    session: str
    reason: str


ToContext = Grant | ReceiveReady | Received | CancelSession
"""Session messages from a generation rank."""
ToGeneration = Announce | ChunkSent | Handoff | NoDecode | SenderFailed | CancelSession
"""Session messages from a context rank."""
ToSource = Pull | ReceiveReady | Received | CancelSession
"""Session messages from a rank that pulls a prefix."""
ToPuller = PrefixFound | PullDeclined | ChunkSent | Handoff | SenderFailed | CancelSession
"""Session messages from the rank that it pulls from."""
SessionMessage = ToContext | ToGeneration | ToSource | ToPuller
ConnectionMessage = Challenge | Hello | Welcome | Introduction | PeerRefused | Heartbeat
ControlMessage = ConnectionMessage | SessionMessage

CONTROL_CODEC: Codec[ControlMessage] = Codec(Annotated[ControlMessage, Field(discriminator="kind")])
"""Both directions of a control connection."""
