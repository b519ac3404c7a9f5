"""What of a prompt the cache has, and why no more of it: the answer schedulers and routers get.

``known >= attention >= reusable``: tokens the tree knows at all, tokens whose REQUIRED attention
pages are there, tokens that can be reused because states stand there too. Beyond ``known_tokens``
the prompt branches off from all others, which is where a snapshot serves the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_core.hashing import Prompt
from kvcache_core.matching import Match, find
from kvcache_core.store import CacheStore


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Tokens of one prompt. ``host_tokens`` of the reusable ones must come back from the host
    first; ``in_flight_tokens`` follow the known ones and are being computed by other sequences.
    """

    known_tokens: int
    attention_tokens: int
    reusable_tokens: int
    host_tokens: int
    in_flight_tokens: int


def look(store: CacheStore, prompt: Prompt) -> Reuse:
    """Read the tree; nothing changes."""
    size = store.tokens_per_block
    root = store.tree.existing_root(prompt.scope)
    if root is None:
        in_flight = _in_flight(store, prompt, 0)
        return Reuse(
            known_tokens=0,
            attention_tokens=0,
            reusable_tokens=0,
            host_tokens=0,
            in_flight_tokens=in_flight,
        )
    match = find(store.groups, store.tree, root, prompt, len(prompt))
    without_states = attention_tokens(store, root, prompt, match, len(prompt))
    hosted = 0
    for index, node in enumerate(match.nodes.tolist()):
        on_host = any(
            store.tree.pages[group.id, node] >= pool.num_device_slots
            for group, pool in zip(store.groups, store.pool_of, strict=True)
            if match.complete[group.id] and not group.life_cycle.is_state
        )
        hosted += on_host * min(size, match.tokens - index * size)
    return Reuse(
        known_tokens=match.content_tokens,
        attention_tokens=without_states,
        reusable_tokens=match.tokens,
        host_tokens=hosted,
        in_flight_tokens=_in_flight(store, prompt, match.content_tokens // size),
    )


def attention_tokens(
    store: CacheStore, root: int, prompt: Prompt, match: Match, max_match: int
) -> int:
    """Tokens that could be reused if states did not matter; ``match`` is the answer with them."""
    attention = [group for group in store.groups if not group.life_cycle.is_state]
    if match.tokens == match.safe_tokens or len(attention) == len(store.groups):
        return match.tokens
    if not attention:
        return match.safe_tokens
    return find(attention, store.tree, root, prompt, max_match).tokens


def count_match(store: CacheStore, root: int, prompt: Prompt, match: Match, max_match: int) -> None:
    """Count what an opened request reuses and what it does not, by reason."""
    counters = store.counters
    counters.sequences_opened += 1
    counters.queried_tokens += min(max_match, len(prompt))
    counters.matched_tokens += match.tokens
    counters.partial_matches += match.tokens % store.tokens_per_block > 0
    without_states = attention_tokens(store, root, prompt, match, max_match)
    counters.snapshot_pruned_tokens += without_states - match.tokens
    counters.page_pruned_tokens += match.safe_tokens - without_states


def _in_flight(store: CacheStore, prompt: Prompt, first: int) -> int:
    """Tokens of the blocks from ``first`` on, in a row, that somebody has announced."""
    if not store.in_flight:
        return 0
    count = 0
    for key in prompt.keys(prompt.blocks)[first : prompt.blocks]:
        if key not in store.in_flight:
            break
        count += 1
    return count * store.tokens_per_block
