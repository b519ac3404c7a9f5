"""Which test holds which row of the study that the engine answers for: S1 to S12, what its section
on the scheduler (2.8) states, and the reviewers' findings B20 to B60 that concern a worker. Rows of
the scheduler itself are in ``engine/test_scheduler_rows.py``. Rows say what nothing tries yet.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.worker.engine.test_scheduler_rows import ROWS as SCHEDULER_ROWS
from tests.worker.engine.test_scheduler_rows import Row

TESTS = Path(__file__).resolve().parents[1]
HOOKS = "worker/test_runtime_hooks.py"
SIZE = "worker/test_cache_size.py"
INPUTS = "worker/model/test_attention_inputs.py"
ATTENTION = "worker/model/test_attention.py"
KERNELS = "worker/model/kernels/test_paged_attention.py"
UPLOADS = "kvcache_core/test_upload.py"
STATES = "kvcache_core/test_core_rows_states.py"
MANAGER = "kvcache_core/test_manager.py"
PLANS = "worker/engine/test_scheduler.py"
PREEMPTION = "worker/engine/test_preemption.py"

ROWS_OF_THE_ISSUE = {
    *(f"S{number}" for number in range(1, 13)),
    *(f"B{number}" for number in (20, 21, 24, 29, 30, 31, 35, 38, 39, 41, 42, 44, 46, 47, 60)),
}

ROWS = {
    "S1": Row(
        "hooks that a model declares, all off, read once",
        (
            (HOOKS, "test_everything_is_off_by_default"),
            (HOOKS, "test_a_declaration_of_something_else_is_refused"),
            (HOOKS, "test_hooks_that_nobody_would_ask_are_refused"),
            (HOOKS, "test_a_declaration_is_imported_by_its_name"),
            (HOOKS, "test_a_worker_sizes_and_makes_its_cache_by_the_declared_class"),
            (STATES, "test_k34_states_of_short_prompts_are_worth_least"),
            (MANAGER, "test_k34_the_manager_gives_prompts_their_priorities"),
        ),
        "state_index_upload_kernel has nobody to use it before a recurrent model runs",
    ),
    "S2": Row(
        "cap of torch = reserved + free - margin, the cache unaffected",
        (
            (SIZE, "test_s2_the_cap_of_torch_is_what_it_has_and_what_is_free_less_the_margin"),
            (SIZE, "test_the_cache_does_not_depend_on_the_margin"),
            (SIZE, "test_a_gpu_is_measured_and_torch_is_limited"),
        ),
    ),
    "S3": Row(
        "a subclass sizes and makes the cache, logged once",
        (
            (HOOKS, "test_s3_only_a_subclass_stands_in_for_the_managers_class"),
            (HOOKS, "test_a_worker_sizes_and_makes_its_cache_by_the_declared_class"),
            (MANAGER, "test_hooks_of_a_subclass_are_what_others_call"),
        ),
    ),
    "S4": Row(
        "a planner of KV-balanced admission",
        ((HOOKS, "test_hooks_that_nobody_would_ask_are_refused"),),
        "whoever asks it: attention data parallelism",
    ),
    "S11": Row(
        "the profiled pools are those of the layout, draft groups included",
        (
            (MANAGER, "test_b34_the_least_pools_count_every_group_of_the_layout"),
            (SIZE, "test_b34_the_largest_step_fits_the_least_pools_of_any_layout"),
            (SIZE, "test_a_measured_cache_takes_its_share_of_what_a_step_leaves"),
        ),
    ),
    "S12": Row(
        "declarations of a drafter",
        (("kvcache_core/test_spec.py", "test_k29_draft_dtype_is_declared_or_the_weights"),),
        "all that a drafter's engine asks",
    ),
    "2.8 generation first": Row(
        "decoding rows are settled before prefills, which keep a share",
        (
            (PLANS, "test_decoding_runs_in_every_step_beside_a_long_prefill"),
            (PLANS, "test_a_prefill_gets_its_share_beside_any_number_of_decoding_sequences"),
        ),
    ),
    "2.8 transfers": Row(
        "who receives pages takes none of the step's budget",
        ((PLANS, "test_a_landing_transfer_takes_the_room_it_was_promised"),),
    ),
    "2.8 chunks": Row(
        "a chunk is bounded by budget and rest; a step is never empty",
        ((PLANS, "test_a_step_keeps_its_bounds_and_never_idles"),),
        "bidirectional blocks of images: no such model is served",
    ),
    "2.8 eviction": Row(
        "the youngest give way, then the one that lacks pages itself",
        (
            (PLANS, "test_pages_are_given_oldest_first_and_taken_youngest_first"),
            (PREEMPTION, "test_four_long_generations_finish_in_a_pool_for_one_and_a_half"),
        ),
    ),
    "2.8 deadlock": Row(
        "nothing to run and nothing to give way is explained",
        (
            (
                PREEMPTION,
                "test_who_waits_for_pages_that_never_come_ends_with_an_explanation"
                "_and_the_others_go_on",
            ),
        ),
    ),
    "B20": Row(
        "devices and types of rows and scales are validated",
        (
            (INPUTS, "test_b20_rows_elsewhere_or_of_another_type_are_refused"),
            (KERNELS, "test_another_device"),
            (KERNELS, "test_scales"),
        ),
    ),
    "B21": Row(
        "no workspace that is not used",
        (
            (INPUTS, "test_b21_gathered_pages_are_those_that_a_step_reads"),
            (INPUTS, "test_b21_kernels_have_no_workspace_of_the_contexts_length"),
            (
                "transfer/test_pair_staging.py",
                "test_neighbours_are_posted_themselves_and_take_no_buffer",
            ),
        ),
    ),
    "B24": Row(
        "the margin stays below what is free",
        (
            (SIZE, "test_b24_the_default_margin_stays_below_what_is_free"),
            (SIZE, "test_b24_at_the_boundary"),
        ),
    ),
    "B29": Row(
        "keys and values cover all tokens, cached ones too",
        (
            (
                INPUTS,
                "test_b29_b30_a_chunk_sees_every_cached_row_at_a_scale_that_is_no_power_of_two",
            ),
            (ATTENTION, "test_equals_the_definition"),
            (KERNELS, "test_any_batch"),
        ),
    ),
    "B30": Row(
        "scales that are neither 1 nor a power of two",
        (
            (
                INPUTS,
                "test_b29_b30_a_chunk_sees_every_cached_row_at_a_scale_that_is_no_power_of_two",
            ),
            (KERNELS, "test_written_rows_are_stored_with_the_reciprocal_scale"),
        ),
    ),
    "B31": Row(
        "8-bit pages are read, not a copy of what was written",
        (
            (KERNELS, "test_written_rows_are_stored_with_the_reciprocal_scale"),
            (KERNELS, "test_a_mixed_batch_equals_the_definition"),
        ),
    ),
    "B38": Row(
        "uploads that are queued together keep their own values",
        (
            (UPLOADS, "test_b38_two_uploads_before_a_sync_keep_both_values"),
            (UPLOADS, "test_b38_a_vector_keeps_the_values_of_every_queued_upload"),
            (UPLOADS, "test_b38_vectors_on_the_device_itself"),
            (
                "worker/model/test_decode.py",
                "test_b38_steps_that_are_queued_together_keep_their_own_values",
            ),
            (
                "worker/model/kernels/test_triton_backend.py",
                "test_b38_steps_described_on_a_late_device_keep_their_own_values",
            ),
        ),
    ),
    "B39": Row(
        "candidate_groups are [0, 0] where the queue is first come, first served",
        (),
        "see S4",
    ),
    "B41": Row(
        "who gave its pages back must be admitted anew",
        (
            (PREEMPTION, "test_four_long_generations_finish_in_a_pool_for_one_and_a_half"),
            (
                "worker/engine/test_aggregated.py",
                "test_more_requests_than_pages_all_finish_by_suspending_the_youngest",
            ),
        ),
        "no test has a manager that keeps what was released: all run over the real one",
    ),
    "B42": Row(
        "a snapshot point that is not aligned",
        (
            (STATES, "test_k32_a_state_is_reused_at_its_exact_length_only"),
            (
                STATES,
                "test_k32_a_snapshot_inside_a_block_is_found_when_the_tree_knows_the_prompt"
                "_beyond_it",
            ),
        ),
        "chunks that end there: see S8 and S9",
    ),
    "B44": Row(
        "a key or value row too few is refused",
        (
            (INPUTS, "test_b44_a_row_too_few_is_refused"),
            (KERNELS, "test_short_rows"),
            ("worker/model/test_runner.py", "test_short_table"),
        ),
    ),
    "B46": Row(
        "uploads beyond 32 bits; anonymous requests have their tokens; the starved go on",
        (
            (UPLOADS, "test_b38_two_uploads_before_a_sync_keep_both_values"),
            (UPLOADS, "test_b38_a_vector_keeps_the_values_of_every_queued_upload"),
            (SIZE, "test_ranks_take_the_least_of_what_they_measured"),
            ("router/test_conversation.py", "test_a_burst_of_unique_prompts_spreads_evenly"),
            (PLANS, "test_a_demoted_prompt_comes_last_until_it_is_starved"),
        ),
    ),
    "B47": Row(
        "renames, defaults, peer checks, the wire, ranks that agree, lifetimes",
        (
            ("kvcache_core/test_hooks.py", "test_b48_a_renamed_hook_leaves_no_dead_override"),
            (HOOKS, "test_everything_is_off_by_default"),
            (SIZE, "test_b24_at_the_boundary"),
            (
                "services/launch/test_config.py",
                "test_demotion_comes_from_the_environment_unless_the_configuration_says_it",
            ),
            ("transfer/test_compatibility.py", "test_a_changed_fact_gives_its_row"),
            ("transfer/test_control_messages.py", "test_golden_bytes"),
            ("transfer/test_rank_info.py", "test_facts_that_a_later_release_adds_are_ignored"),
            (
                "worker/engine/test_parts.py",
                "test_a_follower_that_differs_is_noticed_a_step_late",
            ),
            (STATES, "test_k33_a_commit_without_a_snapshot_keeps_the_slot_for_the_next_one"),
            (UPLOADS, "test_b38_vectors_on_the_device_itself"),
        ),
    ),
    "B60": Row(
        "the CPU tries what a GPU runs, and a run for a GPU cannot skip it",
        (
            (KERNELS, "test_a_mixed_batch_equals_the_definition"),
            (
                "worker/model/test_decode.py",
                "test_b38_steps_that_are_queued_together_keep_their_own_values",
            ),
            (
                "test_requirements.py",
                "test_b60_a_skip_for_want_of_a_gpu_fails_where_one_is_required",
            ),
        ),
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of all tests of a file, those of classes too."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test_or_says_what_is_missing(row: str) -> None:
    entry = ROWS[row]
    assert entry.tests or entry.missing
    for file, name in entry.tests:
        assert name.startswith("test_")
        assert name in names_in(file), f"{file} has no {name}"


def test_no_row_is_left_out() -> None:
    assert ROWS_OF_THE_ISSUE - set(ROWS) - set(SCHEDULER_ROWS) == set()
