"""Which test covers which requirement of the scheduler: rows S5 to S10 and the B rows that concern
it; ``test_study_rows.py`` has the others. Rows say what nothing tries yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAIRNESS = "worker/engine/test_fairness.py"
PLANS = "worker/engine/test_scheduler.py"
SHARED = "worker/engine/test_shared_prefixes.py"
PREEMPTION = "worker/engine/test_preemption.py"
CHUNKS = "worker/engine/test_chunks.py"
STATES = "worker/engine/test_states.py"
DEMOTION = "worker/engine/test_demotion.py"
PREEMPTION_REAL = "worker/engine/test_preemption_real.py"
AGGREGATED = "worker/engine/test_aggregated.py"
CONFIG = "services/launch/test_config.py"


@dataclass(frozen=True)
class Row:
    """One requirement: what it asks, tests as ``(file, name)``, what none of them tries."""

    asks: str
    tests: tuple[tuple[str, str], ...]
    missing: str = ""


ROWS = {
    "S5": Row(
        "demotion of long prompts, from arguments or the environment",
        (
            (PLANS, "test_a_demoted_prompt_comes_last_until_it_is_starved"),
            (CONFIG, "test_demotion_comes_from_the_environment_unless_the_configuration_says_it"),
        ),
    ),
    "S6": Row(
        "demotion by the exact remainder",
        (
            (PLANS, "test_a_demoted_prompt_comes_last_until_it_is_starved"),
            (FAIRNESS, "test_every_prompt_ends_within_its_bounds"),
            (DEMOTION, "test_a_prompt_that_lacks_much_is_admitted_last_until_it_is_starved"),
            (
                DEMOTION,
                "test_only_who_was_ordered_short_and_is_long_and_not_starved_is_deferred",
            ),
            (DEMOTION, "test_a_long_remainder_shows_late_and_short_prompts_keep_coming"),
        ),
    ),
    "S7": Row(
        "a deferred prompt ages",
        (
            (FAIRNESS, "test_a_demoted_prompt_ages_under_a_stream_of_short_ones"),
            (DEMOTION, "test_a_long_remainder_shows_late_and_short_prompts_keep_coming"),
        ),
    ),
    "S8": Row(
        "forced chunk boundaries",
        (
            (CHUNKS, "test_a_chunk_ends_on_a_point_or_at_the_end_or_on_a_multiple_of_the_unit"),
            (CHUNKS, "test_no_point_is_passed_without_its_state_and_every_step_goes_on"),
            (STATES, "test_the_next_turn_goes_on_at_the_exact_end_of_the_last"),
            (STATES, "test_the_second_to_leave_a_prefix_keeps_its_state_for_the_third"),
        ),
        "configured placements (periodic, offsets); no model here has states, the tests' has",
    ),
    "S9": Row(
        "mid-chunk snapshots",
        (
            (CHUNKS, "test_a_marked_chunk_passes_one_aligned_point"),
            (CHUNKS, "test_no_point_is_passed_without_its_state_and_every_step_goes_on"),
            (
                STATES,
                "test_a_chunk_ends_on_a_point_unless_it_can_keep_the_state_on_the_way",
            ),
        ),
        "a model whose kernels keep states in mid-chunk",
    ),
    "B42": Row(
        "an unaligned point stops the chunk",
        ((CHUNKS, "test_a_marked_chunk_passes_one_aligned_point"),),
    ),
    "S10": Row(
        "a prompt waits for a prefix that another computes",
        (
            (SHARED, "test_a_common_beginning_of_prompts_that_come_together_is_computed_once"),
            (SHARED, "test_who_waits_is_not_in_the_way_of_others"),
            (
                SHARED,
                "test_when_the_first_is_cancelled_one_of_those_who_wait_goes_on_where_it_was",
            ),
            (SHARED, "test_nobody_waits_longer_than_the_prefix_is_worth"),
            (
                STATES,
                "test_the_owner_of_a_shared_prefix_is_asked_for_its_state_at_the_shared_end",
            ),
        ),
    ),
    "B35": Row(
        "no starvation by deferral",
        (
            (FAIRNESS, "test_a_demoted_prompt_ages_under_a_stream_of_short_ones"),
            (DEMOTION, "test_a_long_remainder_shows_late_and_short_prompts_keep_coming"),
        ),
    ),
    "B46": Row(
        "a starved prompt is not deferred; what was expected is looked up anew",
        (
            (
                DEMOTION,
                "test_only_who_was_ordered_short_and_is_long_and_not_starved_is_deferred",
            ),
            (DEMOTION, "test_a_long_remainder_shows_late_and_short_prompts_keep_coming"),
        ),
    ),
    "chunks": Row(
        "neither the long starve nor the short wait",
        (
            (FAIRNESS, "test_a_short_prompt_behind_a_long_one_has_its_token_in_the_next_step"),
            (
                FAIRNESS,
                "test_a_hundred_short_prompts_wait_for_each_other_and_not_for_the_long_one",
            ),
            (
                FAIRNESS,
                "test_a_long_prompt_takes_at_most_twice_its_own_steps_under_a_stream_of_short_ones",
            ),
            (FAIRNESS, "test_every_prompt_ends_within_its_bounds"),
        ),
    ),
    "admission": Row(
        "what does not fit is passed, and not for ever",
        (
            (FAIRNESS, "test_a_large_item_is_passed_and_not_starved"),
            (PLANS, "test_nobody_is_passed_by_more_than_it_wants_itself"),
            (PLANS, "test_who_was_promised_room_lands_whatever_new_ones_wait_for"),
        ),
    ),
    "preemption": Row(
        "the youngest give way and all finish",
        (
            (PREEMPTION, "test_four_long_generations_finish_in_a_pool_for_one_and_a_half"),
            (
                AGGREGATED,
                "test_more_requests_than_pages_all_finish_by_suspending_the_youngest",
            ),
            (
                PREEMPTION_REAL,
                "test_four_long_generations_in_pages_for_one_and_a_half_are_equal_to_the_oracle",
            ),
            (
                PREEMPTION,
                "test_who_was_suspended_is_not_kept_out_by_a_stream_of_new_requests",
            ),
        ),
    ),
    "deadlock": Row(
        "who can never go on ends with an explanation",
        (
            (
                PREEMPTION,
                "test_who_waits_for_pages_that_never_come_ends_with_an_explanation"
                "_and_the_others_go_on",
            ),
            (
                PREEMPTION,
                "test_workers_that_prefill_for_each_other_in_small_pools_never_wait_in_a_circle",
            ),
        ),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test_or_says_what_is_missing(row: str) -> None:
    entry = ROWS[row]
    assert entry.tests or entry.missing
    for file, name in entry.tests:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
