"""Messages between front ends and workers: one connection a pair, all requests multiplexed, ids
only (no text).

A worker opens with ``Challenge``; the front end answers ``Hello`` and gets ``Welcome``. After
that the front end sends commands and the worker sends one ``StepOutput`` a step with everything
that happened in it. Every request id was minted by the front end; a client's own ids never
travel as keys. Loads no torch: front ends import this file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from transfer.identity import Incarnation, PeerAddress
from transfer.wire import Codec, Message
from worker.interpreter import WAIT_CLASSES
from worker.token_runs import TokenRuns

WorkerRole = Literal["context", "generation", "aggregated"]
Leg = Literal["context", "generation"]


class SamplingParams(Message):
    """How tokens of one request are drawn. The noise is keyed by (seed, choice, output index) and
    nothing else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int = 0
    """0 <= seed < 2**63. The front end always sets one, so that a repair draws the same tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities. N: that of the token itself and of the N most likely ones, before
    temperature.
    """

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the output tokens before it otherwise than by the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class StopRule(Message):
    """When a choice ends. Stop strings are the front end's business, which then sends
    :class:`Stop`.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids and any the client named; empty when ignored."""
    min_tokens: int = 0
    """Stop token ids are not drawn before this many output tokens."""


class Challenge(Message):
    """First message of a worker on a new connection: a random nonce to prove knowledge of the
    cluster token with.
    """

    kind: Literal["challenge"] = "challenge"
    nonce: bytes


class Hello(Message):
    """Answer of a front end: ``proof = transfer.auth.proof(cluster_token, b"front-end", challenge
    nonce)``.
    """

    kind: Literal["hello"] = "hello"
    front_end: str
    proof: bytes
    nonce: bytes
    """The worker must prove that it knows the token too, before a prompt is sent to it."""


class Welcome(Message):
    """What a worker is. Sent once, after the proof was checked; ``ready`` follows in the gauges."""

    kind: Literal["welcome"] = "welcome"
    proof: bytes
    """``transfer.auth.proof(cluster_token, b"worker", hello nonce)``."""
    incarnation: Incarnation
    role: WorkerRole
    model: str
    tokens_per_block: int
    max_sequence_tokens: int
    """Longest prompt plus output that this worker's pools can ever hold, and the model's context
    limit.
    """
    vocab_size: int
    peer: PeerAddress
    """Where other workers reach this one for transfers."""
    dp_size: int = Field(default=1, ge=1)
    """Ranks that each have requests of their own; above 1 a context leg is told its rank
    (``LegPlaced``) before it waits for a grant.
    """
    transport: str
    kv_dtype: str
    """Element type of keys and values in its pages."""


class PrefixSource(Message):
    """Another instance that is believed to hold KV of the beginning of a prompt."""

    peer: PeerAddress
    tokens: int = Field(ge=0)
    """How many prompt tokens it is believed to hold. A wrong belief costs a question and no
    more.
    """


class Prefill(Message):
    """Run the prompt, stream the first token(s), ship the pages to ``destination``.

    Nothing is computed before ``destination`` has granted it. Without a destination the prompt
    is prefilled, the first token is streamed and the leg ends: the request needs one token only.
    """

    kind: Literal["prefill"] = "prefill"
    request_id: str
    tokens: bytes
    """Prompt, packed int32."""
    scope: bytes
    """Prefix cache scope: model, adapter and cache salt. Requests share blocks only within one
    scope.
    """
    sampling: SamplingParams
    stop: StopRule
    n: int = 1
    destination: Incarnation | None
    prefix_source: PrefixSource | None = None
    """Fetch what it has of the prompt, where that is worth it, before computing the rest."""
    deadline_ms: int
    """Milliseconds from receipt after which the leg ends by itself with ``deadline``."""


class Generate(Message):
    """Decode a request whose prompt comes from ``source``, or prefill it here when there is none.

    ``emitted`` are the output tokens that the client already has, one packed array a choice,
    empty for a fresh request: a repair computes prompt plus emitted tokens and goes on from
    there. Choices in ``finished`` need no more tokens.
    """

    kind: Literal["generate"] = "generate"
    request_id: str
    tokens: bytes
    scope: bytes
    sampling: SamplingParams
    stop: StopRule
    n: int = 1
    source: PeerAddress | None
    emitted: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()
    deadline_ms: int


class Cancel(Message):
    """End every leg of a request on this worker. Idempotent; also remembered for an id that arrives
    later.
    """

    kind: Literal["cancel"] = "cancel"
    request_id: str


class Stop(Message):
    """The front end found a stop string: choice ``choice`` ends, tokens at ``index`` and after are
    not wanted.
    """

    kind: Literal["stop"] = "stop"
    request_id: str
    choice: int
    index: int


class Warm(Message):
    """The context workers that this worker's requests may come from, all of them: connect to each
    before a request does. The gauges tell which pairs are there. Of several front ends the last one
    counts; they know the same cluster.
    """

    kind: Literal["warm"] = "warm"
    peers: tuple[PeerAddress, ...]


class Ping(Message):
    """Heartbeat of the front end; answered at once by the connection, not by the engine."""

    kind: Literal["ping"] = "ping"
    sent_ms: int


class Pong(Message):
    """Answer to a ping. ``engine_age_ms`` is the time since the engine loop last went round: a
    wedge shows here.
    """

    kind: Literal["pong"] = "pong"
    sent_ms: int
    engine_age_ms: int


class LegStarted(Message):
    """The leg's prompt was matched against this worker's cache."""

    request_id: str
    leg: Leg
    prompt_tokens: int
    cached_tokens: int


class LegPlaced(Message):
    """A worker of several dp groups has chosen the one that a context leg lives on: its rank alone
    is the source of the generation leg.
    """

    request_id: str
    rank: int


class LegEnded(Message):
    """The one terminal event of a leg.

    ``succeeded``: every choice finished here, or (context) all pages were handed over.
    ``failed`` with ``retryable`` says that the request itself is sound and may be repaired.
    ``rejected`` is a client error that no worker would accept.
    """

    request_id: str
    leg: Leg
    outcome: Literal["succeeded", "failed", "cancelled", "rejected"]
    code: str = ""
    message: str = ""
    retryable: bool = False
    transferred_bytes: int = 0
    prefill_tokens: int = 0
    """Tokens this leg computed in prefill: 0 on a generation worker whose pages all came by
    transfer.
    """


class TransferPair(Message):
    """One rank that this worker moves pages with, or should."""

    side: Leg
    """Of this worker: a generation worker grants, a context worker sends; whoever pulls a prefix is
    as a generation worker.
    """
    peer: Incarnation
    rank: int
    lane: str
    """Kind of the transport that carries the pages; empty while not connected."""
    reason: str
    """Why it is not connected."""


class WorkerGauges(Message):
    """State of a worker after a step; totals are monotone within an incarnation."""

    ready: bool
    reason: str = ""
    total_blocks: int
    free_blocks: int
    """Free plus evictable: blocks that no sequence and no lease holds."""
    cached_blocks: int
    running: int
    waiting: int
    suspended: int
    transfers_in_flight: int
    quarantined_blocks: int
    prefill_tokens_total: int
    decode_tokens_total: int
    cached_tokens_total: int
    transferred_bytes_total: int
    transferred_blocks_total: int
    preemptions_total: int
    steps_total: int
    host_cached_tokens_total: int
    evicted_pages_total: int
    demoted_pages_total: int
    onboarded_pages_total: int
    pulls_succeeded_total: int
    """Prefixes fetched from other instances."""
    pulls_declined_total: int
    pulls_failed_total: int
    pulls_served_total: int
    """Prefixes that other instances fetched here."""
    pulled_tokens_total: int
    """Prompt tokens whose KV was fetched instead of computed."""
    pairs: tuple[TransferPair, ...]
    late_dials_total: int
    """Requests whose context worker was dialled only when they came."""
    transfer_busy_ms_total: int
    """Time in which pages moved, over all pairs."""
    transfer_busy_bytes_total: int
    """Page bytes moved in that time."""
    staged_bytes_total: int
    """Page bytes that a gather or a scatter copied."""
    staging_bytes: int
    """Memory of the staging buffers, which no quota counts."""
    interpreter_waits: Annotated[
        tuple[int, ...], Field(min_length=WAIT_CLASSES, max_length=WAIT_CLASSES)
    ]
    """Waits of the engine thread for the interpreter, one a step, in the classes of
    :data:`worker.interpreter.WAIT_BOUNDS_US` and one above all; grow as totals do."""
    interpreter_waited_us: int


class StepOutput(Message):
    """Everything one engine step produced for one front end."""

    kind: Literal["step"] = "step"
    placed: tuple[LegPlaced, ...] = ()
    runs: TokenRuns = ()
    started: tuple[LegStarted, ...] = ()
    ended: tuple[LegEnded, ...] = ()
    gauges: WorkerGauges | None = None


class Refused(Message):
    """The connection is refused; the worker closes it after this message."""

    kind: Literal["refused"] = "refused"
    reason: str


FrontEndMessage = Annotated[
    Hello | Prefill | Generate | Cancel | Stop | Warm | Ping, Field(discriminator="kind")
]
WorkerMessage = Annotated[
    Challenge | Welcome | Refused | StepOutput | Pong, Field(discriminator="kind")
]

FRONT_END_CODEC: Codec[Hello | Prefill | Generate | Cancel | Stop | Warm | Ping] = Codec(
    FrontEndMessage
)
"""Front end to worker."""
WORKER_CODEC: Codec[Challenge | Welcome | Refused | StepOutput | Pong] = Codec(WorkerMessage)
"""Worker to front end."""
