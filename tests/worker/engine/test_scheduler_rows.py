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
        ),
        "a DEFER verdict: a prompt is matched before it is ordered, so there is no estimate",
    ),
    "S7": Row(
        "a deferred prompt ages",
        ((FAIRNESS, "test_a_demoted_prompt_ages_under_a_stream_of_short_ones"),),
    ),
    "S8": Row("forced chunk boundaries", (), "chunks end anywhere; no model here has states"),
    "S9": Row("mid-chunk snapshots", (), "the cache has them, no chunk is planned for them"),
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
        ),
        "asking the owner for a snapshot at the shared boundary",
    ),
    "B35": Row(
        "no starvation by deferral",
        ((FAIRNESS, "test_a_demoted_prompt_ages_under_a_stream_of_short_ones"),),
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
        ),
        "four long generations on a real model",
    ),
    "deadlock": Row(
        "who can never go on ends with an explanation",
        (
            (
                PREEMPTION,
                "test_who_waits_for_pages_that_never_come_ends_with_an_explanation"
                "_and_the_others_go_on",
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
