"""How much of a known prefix a request should claim when its drafter's window is not there.

A drafter fed by the target's hidden states cannot make up for KV of a prefix that the target
reuses: it reads its window before the end of the prompt, and a gap there costs acceptance without
a word. So the claim is capped such that the target computes the drafter's last window again. Who
receives pages from a context worker needs no cap: the transfer brings the drafter's pages in full.
"""

from __future__ import annotations

from kvcache_core.groups import LayerGroup
from kvcache_core.hashing import Prompt
from kvcache_core.matching import Match, find
from kvcache_core.spec import ReusePolicy
from kvcache_core.store import CacheStore


def claim_limit(store: CacheStore, prompt: Prompt, max_match: int) -> int:
    """The most tokens of ``prompt`` to reuse, for ``open``. Changes nothing.

    With an incomplete window of ``W`` tokens and ``L`` tokens of prompt: what is complete at the
    last full block, else at most ``L + 1 - W``. Where the prompt leaves all known ones less than a
    window before its end, one window before that branch point, so that the window there is written
    and serves the next request that branches. Rounded down to a block: a block whose beginning is
    not written is never published.
    """
    root = store.tree.existing_root(prompt.scope)
    if root is None or not any(group.life_cycle.needs_hidden_states for group in store.groups):
        return max_match
    match = find(store.groups, store.tree, root, prompt, max_match)
    short = _incomplete(store, match)
    size = store.tokens_per_block
    if short and match.tokens % size:
        whole = find(store.groups, store.tree, root, prompt, match.tokens // size * size)
        if whole.tokens and not _incomplete(store, whole):
            return whole.tokens
    if not short:
        return max_match
    return min(_cap(group, match, len(prompt), size) for group in short)


def _incomplete(store: CacheStore, match: Match) -> list[LayerGroup]:
    """Groups whose missing window matters."""
    return [
        group
        for group in store.groups
        if match.tokens
        and group.life_cycle.needs_hidden_states
        and group.life_cycle.window is not None
        and group.life_cycle.policy is ReusePolicy.OPTIONAL
        and not match.complete[group.id]
    ]


def _cap(group: LayerGroup, match: Match, prompt_tokens: int, tokens_per_block: int) -> int:
    window = group.life_cycle.window
    assert window is not None
    branch = match.content_tokens
    end = branch if prompt_tokens - branch < window else prompt_tokens
    return max(0, end + 1 - window) // tokens_per_block * tokens_per_block
