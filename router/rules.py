"""The load rules: pure choices among candidates, all amounts in tokens.

Every rule is an argmin over a key that is monotone in load and in cached tokens, with a tie-break
that depends on the request and the worker alone. So the order of the candidates does not matter,
more cached tokens never make a worker less attractive and more load never makes it more attractive.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.placement import PlacementReason, PrefixHolder
from transfer.identity import Incarnation


class LoadRule(StrEnum):
    """How a worker is chosen when nothing else decides."""

    ROUND_ROBIN = "round_robin"
    LEAST_BACKLOG = "least_backlog"
    ESTIMATED = "estimated"
    """Backlog plus (1 + beta) times the uncached work of this request: affinity is a term, not a
    pin.
    """


class NewConversationFollow(StrEnum):
    """Which prefixes a new conversation follows to the worker that holds them."""

    SPECIFIC = "specific"
    """Those of a few conversations only; a preamble shared by many spreads by load."""
    ALWAYS = "always"
    """Those of any number of conversations, short of what nearly everyone shares."""


@dataclass(frozen=True, kw_only=True)
class ContextCandidate:
    """A worker that could prefill the prompt."""

    incarnation: Incarnation
    backlog_tokens: int
    prefills: int = 0
    cached_tokens: int = 0
    bound: bool = False
    """The conversation's previous prompts were prefilled here."""


@dataclass(frozen=True, kw_only=True)
class GenerationCandidate:
    """A worker that could decode the request."""

    incarnation: Incarnation
    reserved_tokens: int
    sequences: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0
    """0: unknown, never overloaded."""
    bound: bool = False


@dataclass(frozen=True, kw_only=True)
class PromptFacts:
    """What a rule needs to know of the prompt."""

    request_id: str
    prompt_tokens: int
    preamble_tokens: int = 0
    """Leading tokens that count as shared by everyone under the configured follow rule."""
    new_conversation: bool = False
    """It names a conversation that has no binding: only then may it follow a prefix."""


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Options of the rules."""

    rule: LoadRule = LoadRule.ESTIMATED
    beta: float = 1.0
    """Weight of uncached work beyond its own duration: what recomputation costs the others."""
    overhead_tokens: int = 32
    """What a prefill costs beside its uncached tokens, so that fully cached prompts count too."""
    min_match_tokens: int = 128
    """A new conversation follows a match of at least this many tokens beyond the shared
    preamble.
    """
    pull_tokens: int = 256
    """A prefix is fetched from another worker that holds at least this much more of it."""
    spill_backlog_tokens: int = 65_536
    """A conversation leaves its worker when that is this much further behind than the least loaded
    one.
    """


def tie_break(request_id: str, worker: Incarnation) -> int:
    """Spreads ties evenly and is independent of the order of candidates."""
    return zlib.crc32(f"{request_id}/{worker.instance}/{worker.nonce}".encode())


def choose_context(
    candidates: Sequence[ContextCandidate], facts: PromptFacts, settings: RuleSettings, cursor: int
) -> tuple[ContextCandidate, PlacementReason]:
    """The candidate that prefills the prompt; ``cursor`` counts round-robin turns. Raises
    ValueError for none.
    """
    if not candidates:
        raise ValueError("choose_context: expected at least one candidate")

    def by_backlog(candidate: ContextCandidate) -> tuple[int, int, int]:
        ties = tie_break(facts.request_id, candidate.incarnation)
        return (candidate.backlog_tokens, candidate.prefills, ties)

    if settings.rule is LoadRule.ESTIMATED:

        def by_cost(candidate: ContextCandidate) -> tuple[float, bool, int, int]:
            uncached = max(0, facts.prompt_tokens - candidate.cached_tokens)
            backlog = candidate.backlog_tokens + settings.overhead_tokens * candidate.prefills
            cost = backlog + (1.0 + settings.beta) * uncached
            ties = tie_break(facts.request_id, candidate.incarnation)
            return (cost, not candidate.bound, candidate.prefills, ties)

        return min(candidates, key=by_cost), PlacementReason.ESTIMATED
    least = min(candidates, key=by_backlog)
    spill = least.backlog_tokens + settings.spill_backlog_tokens
    bound = [entry for entry in candidates if entry.bound and entry.backlog_tokens <= spill]
    if bound:
        return min(bound, key=by_backlog), PlacementReason.BOUND
    if facts.new_conversation:
        wanted = facts.preamble_tokens + settings.min_match_tokens
        deepest = max(entry.cached_tokens for entry in candidates)
        if deepest >= wanted:
            holders = [entry for entry in candidates if entry.cached_tokens == deepest]
            return min(holders, key=by_backlog), PlacementReason.FOLLOWED
    if settings.rule is LoadRule.ROUND_ROBIN:
        turns = sorted(candidates, key=lambda entry: str(entry.incarnation))
        return turns[cursor % len(turns)], PlacementReason.ROUND_ROBIN
    return least, PlacementReason.LEAST_BACKLOG


def choose_prefix_source(
    candidates: Sequence[PrefixHolder],
    request_id: str,
    held_tokens: int,
    preferred: Incarnation | None,
    settings: RuleSettings,
) -> PrefixHolder | None:
    """The candidate that a context worker which holds ``held_tokens`` of a prompt fetches from.

    The one that holds most; of equals the ``preferred`` one, where the conversation was decoded and
    which may hold its last answer beyond what is known. None where too little would be saved.
    """
    able = [one for one in candidates if one.tokens >= held_tokens + settings.pull_tokens]

    def by_gain(one: PrefixHolder) -> tuple[int, bool, int]:
        return (one.tokens, one.worker == preferred, tie_break(request_id, one.worker))

    return max(able, key=by_gain, default=None)


def choose_generation(
    candidates: Sequence[GenerationCandidate],
    facts: PromptFacts,
    settings: RuleSettings,
    needed_tokens: int,
    cursor: int,
) -> GenerationCandidate:
    """The candidate that decodes a request of ``needed_tokens`` KV tokens. Raises ValueError for
    none.
    """
    if not candidates:
        raise ValueError("choose_generation: expected at least one candidate")

    def overloaded(candidate: GenerationCandidate) -> bool:
        known = candidate.total_tokens > 0
        return known and candidate.reserved_tokens + needed_tokens > candidate.total_tokens

    def by_cost(candidate: GenerationCandidate) -> tuple[bool, int, bool, int, int]:
        uncached = max(0, facts.prompt_tokens - candidate.cached_tokens)
        cost = candidate.reserved_tokens + uncached
        ties = tie_break(facts.request_id, candidate.incarnation)
        return (overloaded(candidate), cost, not candidate.bound, candidate.sequences, ties)

    if settings.rule is LoadRule.ESTIMATED:
        return min(candidates, key=by_cost)
    bound = [entry for entry in candidates if entry.bound and not overloaded(entry)]
    if bound:
        return min(bound, key=by_cost)
    if settings.rule is LoadRule.ROUND_ROBIN:
        turns = sorted(candidates, key=lambda entry: str(entry.incarnation))
        return turns[cursor % len(turns)]
    return min(candidates, key=by_cost)
