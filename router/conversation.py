"""The conversation router: which workers serve a request.

:meth:`ConversationRouter.place` reads and changes nothing; what follows from a placement is told to
the router in verbs: ``reserve``, then ``release`` for each reservation, and ``succeeded`` or
``failed`` once. Affinity is soft: a binding is made by success only and is ignored as soon as its
worker is gone, refusing, or too far behind.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.ledger import ReservationLedger, TokenBaselines
from router.placement import (
    NoWorkerError,
    Placement,
    PlacementReason,
    PrefixHolder,
    Reservation,
    ReservationKind,
    RouteRequest,
)
from router.prefix_index import ConversationPrefixes, PrefixIndex
from router.rules import (
    ContextCandidate,
    GenerationCandidate,
    LoadRule,
    NewConversationFollow,
    PromptFacts,
    RuleSettings,
    choose_context,
    choose_generation,
    choose_prefix_source,
)
from router.snapshots import WorkerSnapshot
from transfer.identity import Incarnation

logger = logging.getLogger(__name__)

SPECIFIC_FAN_OUT = 4
"""A prefix of at most so many other conversations is specific to them."""
PREAMBLE_FAN_OUT = 64
"""Under "always", a prefix of more conversations than this is a preamble that nobody follows."""
LOG_EVERY_CONVERSATIONS = 256


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Options of a router. Unknown names of rules raise ValueError."""

    tokens_per_block: int = 64
    rules: RuleSettings = field(default_factory=RuleSettings)
    new_conversation_follow: NewConversationFollow | str = NewConversationFollow.SPECIFIC
    local_prefill_tokens: int = 32
    """The context leg is left out when the generation worker lacks at most this many prompt tokens,
    and holds some.
    """
    expected_output_tokens: int = 256
    """Upper bound of what a choice is charged for before its length is known."""
    max_conversations: int = 50_000
    max_prefix_blocks: int = 1_000_000
    default_capacity_blocks: int = 100_000
    """Of a worker that has not said how much it holds."""

    def __post_init__(self) -> None:
        follow = NewConversationFollow(self.new_conversation_follow)
        object.__setattr__(self, "new_conversation_follow", follow)
        rules = replace(self.rules, rule=LoadRule(self.rules.rule))
        object.__setattr__(self, "rules", rules)


@dataclass(frozen=True)
class _Binding:
    prefill: Incarnation
    generation: Incarnation | None


class ConversationRouter:
    """Places requests, keeps the ledger, the prefix index and the conversations' bindings."""

    def __init__(self, settings: RouterSettings) -> None:
        self.ledger = ReservationLedger()
        self.baselines = TokenBaselines(settings.max_conversations)
        self.index = PrefixIndex()
        self._settings = settings
        self._prefixes = ConversationPrefixes(settings.max_prefix_blocks)
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()
        self._versions: dict[str, tuple[str, int]] = {}
        self._capacities: dict[Incarnation, int] = {}
        self._cursor = 0
        self._new_conversations = 0
        self._followed = 0

    @property
    def settings(self) -> RouterSettings:
        """The options it was made with."""
        return self._settings

    def place(self, request: RouteRequest, snapshots: Sequence[WorkerSnapshot]) -> Placement:
        """Choose the workers of a new request. Pure. Raises NoWorkerError only when there is no
        snapshot at all.
        """
        usable = _usable(snapshots, request.excluded)
        cached = self._cached_tokens(request, usable)
        binding = self._binding(request)
        facts = self._facts(request, binding)
        generation = self._choose_generation(request, usable, facts, cached)
        contexts = [entry for entry in usable if entry.role == "context"]
        generation_cached = cached[generation.incarnation]
        if generation.role != "generation" or not contexts:
            reason = _alone_reason(generation)
            return self._local(request, generation.incarnation, generation_cached, facts, reason)
        missing = request.prompt_tokens - generation_cached
        if generation_cached > 0 and missing <= self._settings.local_prefill_tokens:
            return self._local(
                request, generation.incarnation, generation_cached, facts, PlacementReason.LOCAL
            )
        context, reason = choose_context(
            [self._context_candidate(entry, cached, binding) for entry in contexts],
            facts,
            self._settings.rules,
            self._cursor,
        )
        one_token = request.max_output_tokens == 1
        charge = self._charge(request, context.incarnation, context.cached_tokens, reason)
        return Placement(
            request=request,
            context=context.incarnation,
            generation=None if one_token else generation.incarnation,
            context_cached_tokens=context.cached_tokens,
            generation_cached_tokens=generation_cached,
            prefix_source=choose_prefix_source(
                [
                    PrefixHolder(worker, tokens)
                    for worker, tokens in cached.items()
                    if worker != context.incarnation
                ],
                request.request_id,
                context.cached_tokens,
                None if binding is None else binding.generation,
                self._settings.rules,
            ),
            reason=reason,
            prefill=Reservation(request.request_id, "prefill", context.incarnation, charge),
            sequence=None if one_token else self._sequence(request, generation.incarnation),
            new_conversation=facts.new_conversation,
        )

    def place_repair(
        self,
        request: RouteRequest,
        snapshots: Sequence[WorkerSnapshot],
        preferred: Incarnation | None,
    ) -> Placement:
        """Choose one worker that goes on with a request by itself; ``request_id`` is the new leg's
        id.

        The preferred one if it lives and is not excluded, else a generation worker, else any.
        Raises NoWorkerError.
        """
        usable = _usable(snapshots, request.excluded)
        cached = self._cached_tokens(request, usable)
        chosen = next((entry for entry in usable if entry.incarnation == preferred), None)
        if chosen is None:
            facts = self._facts(request, None)
            chosen = self._choose_generation(request, usable, facts, cached)
        worker = chosen.incarnation
        uncached = max(1, request.prompt_tokens - cached[worker])
        return Placement(
            request=request,
            context=None,
            generation=worker,
            generation_cached_tokens=cached[worker],
            reason=PlacementReason.REPAIR,
            prefill=Reservation(request.request_id, "prefill", worker, uncached),
            sequence=self._sequence(request, worker),
        )

    def reserve(self, placement: Placement, snapshots: Sequence[WorkerSnapshot] = ()) -> None:
        """Charge a placement, before the request is sent. ``snapshots`` tell the capacity of the
        workers.
        """
        for snapshot in snapshots:
            if snapshot.total_tokens:
                blocks = snapshot.total_tokens // self._settings.tokens_per_block
                self._capacities[snapshot.incarnation] = blocks
        self.ledger.reserve(placement.prefill)
        if placement.sequence is not None:
            self.ledger.reserve(placement.sequence)
        self._cursor += 1
        request = placement.request
        if request.conversation_id is None or placement.reason is PlacementReason.REPAIR:
            return
        version = self.baselines.begin(
            request.conversation_id, placement.prefill_worker, request.prompt_tokens
        )
        self._versions[request.request_id] = (request.conversation_id, version)
        if placement.new_conversation:
            self._count_new(placement.reason)

    def release(self, leg_id: str, kind: ReservationKind) -> None:
        """End one reservation. Raises LedgerError unless it is open."""
        self.ledger.release(leg_id, kind)

    def succeeded(self, placement: Placement) -> None:
        """The prompt was prefilled and a token came: bind the conversation, believe the blocks to
        be there.
        """
        request = placement.request
        workers = [placement.prefill_worker]
        if placement.generation is not None and placement.generation != placement.prefill_worker:
            workers.append(placement.generation)
        for worker in workers:
            capacity = self._capacities.get(worker, self._settings.default_capacity_blocks)
            self.index.insert(worker, request.keys, capacity)
        settled = self._versions.pop(request.request_id, None)
        if settled is not None:
            self.baselines.succeed(*settled)
        if request.conversation_id is None:
            return
        previous = self._bindings.pop(request.conversation_id, None)
        generation = placement.generation
        if generation is None and previous is not None:
            generation = previous.generation
        prefill = placement.prefill_worker
        if placement.context is None and previous is not None:
            prefill = previous.prefill
        self._bindings[request.conversation_id] = _Binding(prefill, generation)
        self._prefixes.record(request.conversation_id, request.keys)
        while len(self._bindings) > self._settings.max_conversations:
            self._bindings.popitem(last=False)

    def failed(self, request_id: str) -> None:
        """The placed worker gave no token: the request's baseline and its conversation's binding
        go.
        """
        settled = self._versions.pop(request_id, None)
        if settled is not None:
            self.baselines.fail(*settled)
            self._bindings.pop(settled[0], None)

    def abandoned(self, request_id: str) -> None:
        """The request ended without a token and no worker is to blame: only its baseline goes."""
        settled = self._versions.pop(request_id, None)
        if settled is not None:
            self.baselines.fail(*settled)

    def lost(self, worker: Incarnation) -> None:
        """An incarnation is gone for good: nothing about it survives."""
        self.index.forget(worker)
        self._capacities.pop(worker, None)

    def check(self) -> None:
        """Recompute every invariant of the router's own state."""
        self.ledger.check()
        self.index.check()
        self._prefixes.check()

    def _binding(self, request: RouteRequest) -> _Binding | None:
        if request.conversation_id is None:
            return None
        return self._bindings.get(request.conversation_id)

    def _cached_tokens(
        self, request: RouteRequest, usable: Sequence[WorkerSnapshot]
    ) -> dict[Incarnation, int]:
        """The last prompt token is always computed, so a whole match counts one less."""
        depths = self.index.match(request.keys)
        block, most = self._settings.tokens_per_block, max(0, request.prompt_tokens - 1)
        return {
            entry.incarnation: min(depths.get(entry.incarnation, 0) * block, most)
            for entry in usable
        }

    def _facts(self, request: RouteRequest, binding: _Binding | None) -> PromptFacts:
        follow = self._settings.new_conversation_follow
        fan_out = SPECIFIC_FAN_OUT if follow == NewConversationFollow.SPECIFIC else PREAMBLE_FAN_OUT
        new = request.conversation_id is not None and binding is None
        preamble = self._prefixes.shared_blocks(request.keys, fan_out) if new else 0
        return PromptFacts(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            preamble_tokens=preamble * self._settings.tokens_per_block,
            new_conversation=new,
        )

    def _context_candidate(
        self, entry: WorkerSnapshot, cached: dict[Incarnation, int], binding: _Binding | None
    ) -> ContextCandidate:
        load = self.ledger.load(entry.incarnation)
        return ContextCandidate(
            incarnation=entry.incarnation,
            backlog_tokens=load.prefill_tokens,
            prefills=load.prefills,
            cached_tokens=cached[entry.incarnation],
            bound=binding is not None and binding.prefill == entry.incarnation,
        )

    def _choose_generation(
        self,
        request: RouteRequest,
        usable: Sequence[WorkerSnapshot],
        facts: PromptFacts,
        cached: dict[Incarnation, int],
    ) -> WorkerSnapshot:
        able = [entry for entry in usable if entry.role != "context"] or list(usable)
        binding = self._binding(request)
        by_incarnation = {entry.incarnation: entry for entry in able}
        candidates = [
            GenerationCandidate(
                incarnation=entry.incarnation,
                reserved_tokens=self._decode_load(entry),
                sequences=self.ledger.load(entry.incarnation).sequences,
                cached_tokens=cached[entry.incarnation],
                total_tokens=entry.total_tokens,
                bound=binding is not None and binding.generation == entry.incarnation,
            )
            for entry in able
        ]
        chosen = choose_generation(
            candidates, facts, self._settings.rules, self._sequence_tokens(request), self._cursor
        )
        return by_incarnation[chosen.incarnation]

    def _decode_load(self, entry: WorkerSnapshot) -> int:
        load = self.ledger.load(entry.incarnation)
        return load.sequence_tokens + load.prefill_tokens

    def _sequence_tokens(self, request: RouteRequest) -> int:
        output = min(request.max_output_tokens, self._settings.expected_output_tokens)
        return request.prompt_tokens + request.n * output

    def _sequence(self, request: RouteRequest, worker: Incarnation) -> Reservation:
        return Reservation(request.request_id, "sequence", worker, self._sequence_tokens(request))

    def _charge(
        self, request: RouteRequest, worker: Incarnation, cached: int, reason: PlacementReason
    ) -> int:
        uncached = max(1, request.prompt_tokens - cached)
        if self._settings.rules.rule is LoadRule.ESTIMATED or reason is PlacementReason.LOCAL:
            return uncached
        if request.conversation_id is not None:
            known = self.baselines.tokens(request.conversation_id, worker)
            if known is not None:
                return max(request.prompt_tokens - known, self._settings.tokens_per_block)
        return uncached if reason is PlacementReason.FOLLOWED else request.prompt_tokens

    def _local(
        self,
        request: RouteRequest,
        worker: Incarnation,
        cached: int,
        facts: PromptFacts,
        reason: PlacementReason,
    ) -> Placement:
        charge = self._charge(request, worker, cached, reason)
        return Placement(
            request=request,
            context=None,
            generation=worker,
            generation_cached_tokens=cached,
            reason=reason,
            prefill=Reservation(request.request_id, "prefill", worker, charge),
            sequence=self._sequence(request, worker),
            new_conversation=facts.new_conversation,
        )

    def _count_new(self, reason: PlacementReason) -> None:
        self._new_conversations += 1
        self._followed += reason is PlacementReason.FOLLOWED
        if self._new_conversations % LOG_EVERY_CONVERSATIONS == 0:
            logger.info(
                "%d new conversations so far, %d of them followed a matching prefix",
                self._new_conversations,
                self._followed,
            )


def _usable(
    snapshots: Sequence[WorkerSnapshot], excluded: frozenset[Incarnation]
) -> list[WorkerSnapshot]:
    """Accepting workers that are not excluded; failing that accepting ones, failing that all."""
    if not snapshots:
        raise NoWorkerError("no live worker")
    accepting = [entry for entry in snapshots if entry.accepting]
    allowed = [entry for entry in accepting if entry.incarnation not in excluded]
    return allowed or accepting or list(snapshots)


def _alone_reason(generation: WorkerSnapshot) -> PlacementReason:
    if generation.role == "aggregated":
        return PlacementReason.ESTIMATED
    return PlacementReason.NO_CONTEXT
