"""Reuse policies, partial endpoints, claims and backoff: what a request may reuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.spec import KVCacheLayerSpec, ReusePolicy
from tests.kvcache_core.support import BLOCK, DRAFT, LAYOUTS, SCOPE, Rig, layer

PROMPT = list(range(100, 140))  # ten blocks
WINDOW = 6
OPTIONAL, REQUIRED = ReusePolicy.OPTIONAL, ReusePolicy.REQUIRED


class SpecRig(Rig):
    """A rig of any layers."""

    def __init__(self, specs: list[KVCacheLayerSpec], slots: int = 64, host_slots: int = 0) -> None:
        LAYOUTS["spec rig"] = specs
        try:
            super().__init__("spec rig", slots, host_slots=host_slots)
        finally:
            del LAYOUTS["spec rig"]

    def draft_written(self, tokens: list[int]) -> None:
        """Leave ``tokens`` in the tree as a context worker's transfer does: only the drafter's last
        window has pages.
        """
        sequence = self.open(tokens, max_match=0)
        assert sequence.grow_to_receive(len(tokens))
        for group in self.groups:
            self.memory.write(sequence, tokens, 0, len(tokens), group)
        sequence.advance(len(tokens))
        sequence.commit(tokens[sequence.committed :])
        sequence.close()

    def claim(self, tokens: list[int]) -> int:
        """The limit for a request that computes its prompt here."""
        return self.manager.claim_limit(self.manager.prompt(SCOPE, tokens), len(tokens) - 1)


def hungry(layer_id: int, window: int = WINDOW) -> KVCacheLayerSpec:
    """A drafter fed by the target's hidden states, with a window, in a pool group of its own."""
    spec = layer(layer_id, window=window, heads=2, owner=DRAFT, policy=OPTIONAL)
    return replace(spec, needs_hidden_states=True)


def test_k15_required_constrains_the_match() -> None:
    rig = SpecRig([layer(0), layer(1, window=WINDOW, owner=DRAFT)])
    rig.draft_written(PROMPT)
    assert rig.manager.probe(SCOPE, [*PROMPT[:22], 1]) == 0
    assert rig.manager.probe(SCOPE, [*PROMPT, 1]) == 40


def test_k15_optional_does_not_constrain_and_tells_whether_it_is_complete() -> None:
    rig = SpecRig([layer(0), layer(1, window=WINDOW, owner=DRAFT, policy=OPTIONAL)])
    rig.draft_written(PROMPT)
    branch, whole = rig.open([*PROMPT[:22], 1]), rig.open([*PROMPT, 1])
    assert branch.matched_tokens == 22
    assert list(branch.reused_groups) == [0]
    assert whole.matched_tokens == 40
    assert list(whole.reused_groups) == [0, 1]


def test_k15_a_declined_group_gives_its_pages_up_before_new_ones_are_made() -> None:
    """Restated: a request takes complete groups unless it declines them before the first grow. With
    no page to spare the declined ones make the room.
    """
    rig = SpecRig([layer(0), layer(1, heads=2, owner=DRAFT, policy=OPTIONAL)], slots=10)
    rig.cache(PROMPT[:36])
    sequence = rig.open(PROMPT[:40], max_match=36)
    assert list(sequence.reused_groups) == [0, 1]
    sequence.decline(1)
    assert sequence.grow(40)
    rig.manager.check()
    assert list(sequence.reused_groups) == [0]
    with pytest.raises(ValueError, match="layer group 0 is not OPTIONAL"):
        rig.open(PROMPT).decline(0)


def test_k15_private_is_never_published_and_always_fresh() -> None:
    rig = SpecRig([layer(0), layer(1, heads=2, owner=DRAFT, policy=ReusePolicy.PRIVATE)])
    first = rig.run(PROMPT)
    old = set(first.block_table(1).tolist())
    second = rig.open([*PROMPT, 1])
    assert second.grow(41)
    assert second.block_table(0)[:10].tolist() == first.block_table(0).tolist()
    assert not set(second.block_table(1).tolist()) & {*old, -1}
    first.close()
    second.close()
    assert rig.manager.usage()[rig.plan.layer_groups[1].pool_group].cached == 0


def test_k15_the_policy_is_part_of_the_life_cycle() -> None:
    plan = LayoutPlan.derive(
        [layer(index, policy=policy) for index, policy in enumerate(ReusePolicy)],
        tokens_per_block=BLOCK,
    )
    assert len(plan.layer_groups) == 3


def test_k16_an_optional_group_reuses_the_partial_page_by_copy() -> None:
    rig = SpecRig([layer(0), layer(1, heads=2, owner=DRAFT, policy=OPTIONAL)])
    rig.cache(PROMPT[:22])
    sequence = rig.open(PROMPT[:30])
    assert (sequence.matched_tokens, sequence.reused_groups) == (22, (0, 1))
    shared = int(sequence.block_table(1)[5])
    assert rig.compute(sequence, PROMPT[:30])
    assert (1, shared, int(sequence.block_table(1)[5])) in rig.memory.copies
    rig.verify(sequence, PROMPT[:30])
    assert rig.manager.counters.partial_matches == 1


def test_b12_an_optional_group_is_complete_inside_a_page() -> None:
    """Nothing of the drafter is computed again below the match, aligned or not."""
    rig = SpecRig([layer(0), layer(1, owner=DRAFT, policy=OPTIONAL)])
    rig.cache(PROMPT)
    for end in range(1, 40):
        sequence = rig.open([*PROMPT[:end], 1])
        assert (sequence.matched_tokens, sequence.reused_groups) == (end, (0, 1))
        sequence.close()


def test_k16_a_partial_block_keeps_the_drafters_page_that_the_block_covering_it_lacks() -> None:
    """The full block came without the drafter's page; the tail of another sequence has it."""
    rig = SpecRig([layer(0), hungry(1)])
    rig.draft_written(PROMPT)
    tail = PROMPT[:22]
    sequence = rig.open(tail, max_match=0)
    assert rig.compute(sequence, tail)
    sequence.close()
    rig.manager.check()
    again = rig.open([*tail, 1])
    assert (again.matched_tokens, again.reused_groups) == (22, (0, 1))
    rig.verify(again, tail)


def test_k16_the_partial_block_outlives_a_full_one_without_the_drafters_page() -> None:
    rig = SpecRig([layer(0), hungry(1)])
    rig.cache(PROMPT[:22])
    rig.draft_written(PROMPT)
    again = rig.open([*PROMPT[:22], 1])
    assert (again.matched_tokens, again.reused_groups) == (22, (0, 1))
    rig.verify(again, PROMPT[:22])
    rig.cache(PROMPT)
    rig.manager.check()


def test_k16_a_match_whose_partial_page_is_missing_falls_back_to_the_last_full_page() -> None:
    """A REQUIRED window whose partial page is gone: the whole block before it still serves."""
    rig = SpecRig([layer(0), layer(1, window=5, heads=2)])
    rig.cache(PROMPT[:20])
    sequence = rig.open(PROMPT, max_match=20)
    assert sequence.grow_to_receive(40)
    for group in rig.groups:
        rig.memory.write(sequence, PROMPT, 0, 40, group)
    sequence.advance(40)
    sequence.commit(PROMPT[20:])
    sequence.close()
    assert rig.manager.probe(SCOPE, [*PROMPT[:22], 1]) == 20


def test_k17_an_incomplete_window_caps_the_claim() -> None:
    rig = SpecRig([layer(0), hungry(1)])
    rig.draft_written(PROMPT)
    long = [*PROMPT[:21], *range(30)]
    assert rig.manager.probe(SCOPE, long) == 21
    # far from the end of the prompt nothing is lost: the target computes the last window anyway
    assert rig.claim(long) == (len(long) + 1 - WINDOW) // BLOCK * BLOCK
    sequence = rig.open(long, max_match=rig.claim(long))
    assert sequence.matched_tokens == 21
    # near its end the claim leaves one window to compute
    short = [*PROMPT[:30], 1, 2, 3, 4, 5, 6, 7]
    assert rig.claim(short) == (37 + 1 - WINDOW) // BLOCK * BLOCK


def test_k17_a_branch_near_the_end_of_the_prompt_gets_its_window() -> None:
    """The claim stops one window before the branch, so the next request there finds it."""
    rig = SpecRig([layer(0), hungry(1)])
    rig.draft_written(PROMPT)
    branch = [*PROMPT[:30], 1, 2, 3, 4, 5]
    limit = rig.claim(branch)
    assert limit == (30 + 1 - WINDOW) // BLOCK * BLOCK < (35 + 1 - WINDOW) // BLOCK * BLOCK
    sequence = rig.open(branch, max_match=limit)
    assert sequence.matched_tokens == 24
    assert sequence.grow(35)
    for group in rig.groups:
        rig.memory.write(sequence, branch, 24, 35, group)
    sequence.advance(35)
    sequence.commit(branch[24:])
    sequence.close()
    rig.manager.check()
    other = [*PROMPT[:30], 7, 8]
    assert rig.claim(other) == 31
    again = rig.open(other, max_match=31)
    assert (again.matched_tokens, again.reused_groups) == (30, (0, 1))
    rig.memory.verify(again, other, 30, 1)


def test_k17_a_partial_match_first_retries_at_its_last_full_page() -> None:
    rig = SpecRig([layer(0), hungry(1)])
    rig.cache(PROMPT[:20])
    rig.draft_written(PROMPT)  # the drafter's page of the sixth block is missing
    prompt = [*PROMPT[:22], 1]
    assert rig.claim(prompt) == 20
    assert rig.open(prompt, max_match=20).reused_groups == (0, 1)


def test_k17_a_partial_match_of_the_first_block_is_capped_not_given_up() -> None:
    """Nothing is complete at zero tokens."""
    rig = SpecRig([layer(0), hungry(1)])
    rig.draft_written(PROMPT)
    prompt = [*PROMPT[:3], *range(40)]
    assert rig.claim(prompt) == (43 + 1 - WINDOW) // BLOCK * BLOCK
    assert rig.open(prompt, max_match=rig.claim(prompt)).matched_tokens == 3


def test_k17_a_complete_window_and_an_independent_drafter_need_no_cap() -> None:
    rig = SpecRig([layer(0), hungry(1)])
    rig.cache(PROMPT)
    assert rig.claim([*PROMPT[:37], 1]) == 37
    independent = SpecRig([layer(0), layer(1, window=WINDOW, owner=DRAFT, policy=OPTIONAL)])
    independent.draft_written(PROMPT)
    assert independent.claim([*PROMPT[:30], 1]) == 30


def test_k17_only_written_blocks_are_published() -> None:
    """The block that the match covers in part is not the drafter's to publish."""
    rig = SpecRig([layer(0), hungry(1)])
    rig.draft_written(PROMPT)
    tokens = [*PROMPT[:22], *range(10)]
    sequence = rig.open(tokens)
    assert rig.compute(sequence, tokens)
    sequence.close()
    groups = {end: rig.open(tokens, max_match=end).reused_groups for end in (23, 24, 28, 32)}
    assert groups == {23: (0,), 24: (0,), 28: (0,), 32: (0, 1)}


def test_k17_a_resumed_sequence_computes_its_drafters_window_again() -> None:
    """Its drafter's pages were lost while it was suspended: the target's must not be all reused."""
    rig = SpecRig([layer(0), hungry(1)], slots=16)
    sequence = rig.run(PROMPT)
    sequence.suspend()
    rig.manager._store.lose(1, rig.manager._store.tree.pages[1, 10:11])
    assert rig.manager.probe(SCOPE, PROMPT) == 40
    assert sequence.resume()
    assert sequence.history == sequence.committed == (40 + 1 - WINDOW) // BLOCK * BLOCK
    assert rig.compute(sequence, PROMPT)
    rig.verify(sequence, PROMPT)
    rig.manager.check()


def test_k17_a_receiver_needs_no_cap_and_gets_the_drafter_in_full() -> None:
    """B10: what a transfer brings is everything the drafter reads, the reused prefix included."""
    rig = SpecRig([layer(0), hungry(1, window=20)])
    rig.draft_written(PROMPT)
    prompt = [*PROMPT[:30], *range(6)]
    sequence = rig.open(prompt)
    assert (sequence.matched_tokens, sequence.reused_groups) == (30, (0,))
    assert sequence.grow_to_receive(36)
    start, _ = rig.plan.layer_groups[1].life_cycle.stale_range(36, BLOCK)
    assert start == 0
    needed = [-1 not in sequence.block_table(1)[4:].tolist(), sequence.block_table(1)[:4].tolist()]
    assert needed == [True, [-1] * 4]  # token 17 and later: block 4 on
    lease = sequence.lease(4, 9)
    draft = next(view.id for view in rig.plan.views if view.layer_group == 1)
    assert lease.slots(draft).tolist() == sequence.block_table(1)[4:].tolist()
    rig.manager.check()


def test_b10_a_lease_names_the_drafters_pages_unless_they_are_private() -> None:
    shared = SpecRig([layer(0), hungry(1)])
    lease = shared.run(PROMPT).lease(0, 10)
    assert {shared.plan.views[view].layer_group for view in lease.views} == {0, 1}
    alone = SpecRig([layer(0), layer(1, owner=DRAFT, policy=ReusePolicy.PRIVATE)])
    lease = alone.run(PROMPT).lease(0, 10)
    assert {alone.plan.views[view].layer_group for view in lease.views} == {0}


def test_b11_a_branch_does_not_compute_everything_again_for_the_drafter() -> None:
    """With REQUIRED the match would be 0 tokens; OPTIONAL keeps the target's 30."""
    lengths = {}
    for policy in (OPTIONAL, REQUIRED):
        rig = SpecRig([layer(0), layer(1, window=WINDOW, owner=DRAFT, policy=policy)])
        rig.draft_written(PROMPT)
        lengths[policy] = rig.manager.probe(SCOPE, [*PROMPT[:30], 1])
    assert lengths == {OPTIONAL: 30, REQUIRED: 0}


def ahead_rig(ahead: int) -> SpecRig:
    """A drafter whose KV at a position depends on the next ``ahead`` tokens."""
    draft = replace(layer(1, heads=2, owner=DRAFT, policy=OPTIONAL), look_ahead_tokens=ahead)
    return SpecRig([layer(0), draft])


@pytest.mark.parametrize("ahead", [1, 2])
def test_backoff_drops_what_depends_on_tokens_that_may_differ(ahead: int) -> None:
    rig = ahead_rig(ahead)
    rig.cache(PROMPT[:20])
    assert rig.manager.probe(SCOPE, PROMPT) == 20 - ahead
    assert rig.manager.probe(SCOPE, [*PROMPT[:13], 1, 2, 3]) == 13 - ahead
    assert rig.manager.probe(SCOPE, [*PROMPT[:1], 1, 2, 3]) == 0
    sequence = rig.open(PROMPT)
    assert rig.compute(sequence, PROMPT)
    rig.verify(sequence, PROMPT)
    rig.manager.check()


def test_backoff_costs_nothing_where_the_tokens_ahead_are_known_to_agree() -> None:
    """A limit below what is known, a claim at a block's end, is reused to the last token."""
    rig = ahead_rig(1)
    rig.cache(PROMPT)
    for limit in (8, 12, 38):
        assert rig.open(PROMPT, max_match=limit).matched_tokens == limit
    assert rig.open(PROMPT, max_match=40).matched_tokens == 39
    assert rig.open([*PROMPT[:12], 1], max_match=12).matched_tokens == 11


def test_k27_the_extent_ends_behind_the_last_page_not_at_their_number() -> None:
    """B8: stale blocks leave gaps in front of the live tail."""
    rig = SpecRig([layer(0), layer(1, window=WINDOW, heads=2)])
    sequence = rig.run(PROMPT)
    table = sequence.block_table(1)
    assert int((table >= 0).sum()) == 2
    assert (sequence.extent(1), sequence.extent(0)) == (10, 10)
    assert sequence.grow(45)
    assert sequence.extent(1) == sequence.extent(0) == 12
    assert rig.open([1]).extent(0) == 0


def test_b8_the_drafters_block_behind_the_context_has_pages() -> None:
    """The bound a drafter appends within is the extent: its last slot is paged too."""
    rig = SpecRig([layer(0), hungry(1)])
    sequence = rig.run(PROMPT[:38])
    width = 8
    assert sequence.grow(38 + width)
    for group in rig.groups:
        assert sequence.extent(group) * BLOCK >= 38 + width
        assert sequence.block_table(group)[(38 + width - 1) // BLOCK] >= 0


def test_match_limits_and_foreign_block_sizes_are_refused() -> None:
    rig = Rig("full", 8)
    with pytest.raises(ValueError, match="max_match must not be negative, got -1"):
        rig.open([1], max_match=-1)
    other = UnifiedKVCacheManager(rig.plan, [4], rig.memory, incarnation="worker@1")
    prompt = Rig("full", 8, tokens_per_block=3).manager.prompt(SCOPE, [1, 2, 3])
    with pytest.raises(ValueError, match="blocks of 4 tokens, got 3"):
        other.open_prompt(prompt, max_match=1)
