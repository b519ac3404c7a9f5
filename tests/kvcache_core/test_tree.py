"""The tree's match equals a brute-force longest prefix, in any order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvcache_core.hashing import Prompt, child_key, pack_tokens, prefix_keys, root_key
from kvcache_core.matching import find
from kvcache_core.pages import DEFAULT_PRIORITY
from kvcache_core.priorities import PagePriorities
from kvcache_core.tree import PrefixTree
from tests.kvcache_core.support import SCOPE, Rig, plan_of

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=12)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens in common, one by one."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@pytest.mark.parametrize("tokens_per_block", [1, 2, 3, 4, 7])
@settings(max_examples=25, deadline=None)
@given(prompts=PROMPTS, query=st.lists(st.integers(0, 2), max_size=24))
def test_match_equals_the_longest_common_prefix(
    tokens_per_block: int, prompts: list[list[int]], query: list[int]
) -> None:
    rig = Rig("full", 400, tokens_per_block)
    for prompt in prompts:
        rig.cache(prompt)
    expected = max(common(prompt, query) for prompt in prompts)
    assert rig.manager.probe(SCOPE, query) == expected


@settings(max_examples=12, deadline=None)
@given(prompts=PROMPTS, query=st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_what_is_matched_can_be_read(prompts: list[list[int]], query: list[int]) -> None:
    """Windows, sinks and several pools: whatever length is matched, its pages are right."""
    for name in ("mixed, two pool groups", "windows only", "sinks", "recurrent"):
        rig = Rig(name, 400)
        for prompt in prompts:
            rig.cache(prompt)
        sequence = rig.open(query)
        rig.verify(sequence, query)
        assert rig.compute(sequence, query)
        rig.verify(sequence, query)
        rig.manager.check()


def test_hundreds_of_branches_still_match_inside_a_block() -> None:
    rig = Rig("full", 900)
    for branch in range(300):
        sequence = rig.open([1, 2, 3, 4, 5, branch])
        assert rig.compute(sequence, [1, 2, 3, 4, 5, branch])
        sequence.close()
    rig.manager.check()
    assert rig.manager.probe(SCOPE, [1, 2, 3, 4, 5, 299, 7]) == 6
    assert rig.manager.probe(SCOPE, [1, 2, 3, 4, 5, 1000, 7]) == 5


def test_longer_block_replaces_the_partial_one_it_begins_with() -> None:
    rig = Rig("full", 16)
    rig.cache([1, 2])
    rig.cache([1, 2, 3])
    assert rig.manager.cached_blocks() == 1
    rig.cache([1, 2, 3, 4, 5])
    assert rig.manager.cached_blocks() == 2
    rig.cache([1, 2])
    assert rig.manager.cached_blocks() == 2


def test_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    rig = Rig("full", 6)
    rig.cache([1] * 8)
    rig.cache([2] * 8)
    rig.open([1] * 9).close()
    rig.cache([3] * 12)
    assert rig.manager.probe(SCOPE, [1] * 8) == 8
    assert rig.manager.probe(SCOPE, [2] * 8) == 4


def test_priority_outlives_recency() -> None:
    rig = Rig("full", 6)
    important = rig.manager.open(
        SCOPE, [1] * 8, max_match=0, priorities=PagePriorities(attention=DEFAULT_PRIORITY + 1)
    )
    assert rig.compute(important, [1] * 8)
    important.close()
    rig.cache([2] * 8)
    rig.cache([3] * 12)
    assert rig.manager.probe(SCOPE, [1] * 8) == 8
    assert rig.manager.probe(SCOPE, [2] * 8) == 4
    with pytest.raises(ValueError, match=r"priority must be in 0\.\.100, got 101"):
        rig.manager.open(SCOPE, [1], max_match=1, priorities=PagePriorities(attention=101))


def test_losing_a_parent_takes_the_children_along() -> None:
    """A child of higher priority outlives its parent in the queue, not in the tree."""
    rig = Rig("full", 4)
    rig.cache([1] * 4)
    child = rig.manager.open(SCOPE, [1] * 8, max_match=0, priorities=PagePriorities(attention=90))
    assert rig.compute(child, [1] * 8)
    child.close()
    rig.manager.check()
    rig.cache([2] * 12)
    assert rig.manager.probe(SCOPE, [1] * 8) in (0, 4)
    rig.manager.check()


def test_windowed_leaf_that_loses_its_pages_leaves_the_tree() -> None:
    rig = Rig("windows only", 12)
    rig.cache([1] * 8)
    rig.cache([2] * 24)
    rig.manager.check()
    assert rig.manager.probe(SCOPE, [1] * 8) == 0
    rig.cache([3] * 24)
    rig.manager.check()


def test_match_needs_sinks_and_the_last_window() -> None:
    """One windowed group: window 6, two sink blocks; blocks of a path lose their pages in turn."""
    plan = plan_of("sinks")
    tokens = list(range(40))
    packed = pack_tokens(tokens)
    for lost in range(10):
        tree = PrefixTree(2, plan.tokens_per_block, 0)
        node = root = tree.root(SCOPE)
        for block in range(10):
            block_tokens = packed[block * 16 : (block + 1) * 16]
            key, _ = tree.child(node, block_tokens)
            node = tree.insert(node, key, block_tokens)
            tree.pages[:, node] = (block, -1 if block == lost else block + 10)
        prompt = Prompt(SCOPE, tokens, plan.tokens_per_block)
        found = find(plan.layer_groups, tree, root, prompt, len(tokens))
        # at 40 tokens blocks 0, 1 (sinks), 8 and 9 (window) are needed; without 8 or 9 the length
        # falls back to where the window ends before them, without a sink to the blocks before it
        assert found.tokens == {0: 0, 1: 4, 8: 32, 9: 36}.get(lost, 40)


def test_clear_forgets_everything_but_open_sequences_go_on() -> None:
    rig = Rig("full", 16)
    rig.cache([1] * 8)
    sequence = rig.run([2] * 6)
    rig.manager.clear()
    rig.manager.check()
    assert rig.manager.probe(SCOPE, [1] * 8) == 0
    assert rig.compute(sequence, [2] * 11)
    rig.verify(sequence, [2] * 11)
    sequence.close()
    rig.manager.check()
    assert rig.manager.free_blocks() == 16
    rig.cache([1] * 8)
    assert rig.manager.probe(SCOPE, [1] * 8) == 8


def test_keys_are_a_sha256_chain() -> None:
    keys = prefix_keys(b"scope", [1, 2, 3, 4, 5], 2)
    first = child_key(root_key(b"scope"), (1).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    assert keys == [first, child_key(first, pack_tokens([3, 4]))]
    assert [len(key) for key in keys] == [32, 32]
    assert prefix_keys(b"other", [1, 2], 2) != keys[:1]
    assert keys[0].hex() == prefix_keys(b"scope", [1, 2], 2)[0].hex()


def test_blocks_are_found_however_they_are_numbered() -> None:
    """In a row, with another chain's between them, and up to where a row goes on differently."""
    tree = PrefixTree(1, 2, 0)
    root = tree.root(SCOPE)
    chain = Prompt(SCOPE, range(40), 2)
    branch = Prompt(SCOPE, [*range(24), *[9] * 16], 2)
    mixed = [Prompt(SCOPE, [number] * 40, 2) for number in (50, 60)]
    row = tree.insert_chain(root, chain.keys(20), chain.packed).tolist()
    assert tree.walk(chain, 20).tolist() == row
    assert tree.walk(branch, 20).tolist() == row[:12]
    below = tree.insert_chain(row[11], branch.keys(20)[12:], branch.packed[96:]).tolist()
    ends = [root, root]
    paths: list[list[int]] = [[], []]
    for block in range(20):
        for prompt, path, number in zip(mixed, paths, range(2), strict=True):
            tokens = prompt.packed[block * 8 : (block + 1) * 8]
            ends[number] = tree.insert(ends[number], prompt.keys(20)[block], tokens)
            path.append(ends[number])
    assert [tree.walk(prompt, 20).tolist() for prompt in mixed] == paths
    assert tree.walk(chain, 20).tolist() == row
    assert tree.walk(branch, 20).tolist() == row[:12] + below
    assert tree.walk(chain, 17).tolist() == row[:17]
    assert not len(tree.walk(Prompt(b"another scope", range(40), 2), 20))


def test_partial_matches_come_longest_first() -> None:
    tree = PrefixTree(1, 3, 0)
    root = tree.root(SCOPE)
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 5, 5], [2, 2, 2]):
        packed = pack_tokens(tokens)
        key, _ = tree.child(root, packed)
        tree.insert(root, key, packed)
    found = [length for _, length in tree.partial_matches(root, pack_tokens([1, 2, 4, 9]))]
    assert found == [3, 2, 1]


def test_a_sibling_serves_where_the_known_block_has_lost_its_pages() -> None:
    plan = plan_of("windows only")
    tree = PrefixTree(2, plan.tokens_per_block, 0)
    root = tree.root(SCOPE)
    for slot, tokens in ((-1, [0, 0, 0, 0]), (3, [0, 9])):
        packed = pack_tokens(tokens)
        key, _ = tree.child(root, packed)
        tree.pages[:, tree.insert(root, key, packed)] = slot
    found = find(plan.layer_groups, tree, root, Prompt(SCOPE, [0] * 4, plan.tokens_per_block), 4)
    assert (found.tokens, found.content_tokens) == (1, 4)
