"""Which test covers which reported fault of transfers: hangs, leaks and aborts (A), peers that die
and return (B), wrong pages (C), the hand-over of the first token (D) and what else rides with it
(K, M), memory and transports (L), and who else may come (S). Real processes over UCX come first in
a row; what belongs to the engine, the router or the front end is named where it is tried. Rows say
what nothing tries yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CANCELS = "transfer/test_ucx_cancels.py"
DEATHS = "transfer/test_ucx_deaths.py"
DIALS = "transfer/test_ucx_dials.py"
PAUSES = "transfer/test_ucx_pauses.py"
STRANGERS = "transfer/test_ucx_strangers.py"
SOAK = "transfer/test_ucx_soak.py"
STORM = "transfer/test_ucx_storm.py"
AGENTS = "transfer/test_ucx_agents.py"
STAGING = "transfer/test_ucx_staging.py"
PROCESSES = "transfer/test_ucx_processes.py"
PEERS = "transfer/test_agent_peers.py"
PAIR = "worker/engine/test_pair.py"
SERVICE = "services/orchestration/test_service_faults.py"
LINKS = "e2e/test_unequal_links.py"
RANKS = "transfer/test_ucx_ranks.py"
GEOMETRIES = "transfer/test_geometries.py"
PLAN = "transfer/test_plan.py"
COMPATIBILITY = "transfer/test_compatibility.py"
INSTANCES = "transfer/test_agent_ranks.py"
ARRIVALS = "services/orchestration/test_arrivals.py"
ONE_RANK = "no worker of several ranks: an answer against the oracle"


@dataclass(frozen=True)
class Row:
    """One kind of fault: how it shows, tests as ``(file, name)``, what none of them tries."""

    fault: str
    tests: tuple[tuple[str, str], ...]
    missing: str = ""


ROWS = {
    "A1": Row(
        "pages of an aborted request are never freed",
        (
            (CANCELS, "test_a_generation_rank_cancels_at_every_stage"),
            (AGENTS, "test_a_storm_of_cancellations_leaves_no_byte_and_no_page_behind"),
            ("e2e/test_disconnects.py", "test_half_of_two_hundred_clients_leave"),
        ),
    ),
    "A2": Row(
        "a receiver without room strands the sender's pages",
        (
            (CANCELS, "test_a_generation_rank_cancels_at_every_stage"),
            (LINKS, "test_fifty_requests_on_a_decode_pool_of_two_prompts"),
        ),
    ),
    "A3": Row(
        "abort in the receiver's queue",
        (
            (PAIR, "test_cancel_at_every_stage_brings_every_page_home"),
            ("services/http/test_disconnect.py", "test_leaving_while_the_request_queues"),
        ),
    ),
    "A4": Row(
        "a cancellation that comes before the request",
        (
            (CANCELS, "test_a_generation_rank_cancels_at_every_stage"),
            (PAIR, "test_cancel_that_overtakes_the_request"),
        ),
    ),
    "A6": Row(
        "the sender dies and the receiver waits for ever",
        (
            (DEATHS, "test_a_killed_context_rank_is_back_at_its_port"),
            (DEATHS, "test_a_killed_generation_rank_is_back_at_its_port"),
            (DEATHS, "test_a_context_rank_is_killed_while_it_is_dialled"),
            (DEATHS, "test_a_generation_rank_is_killed_while_it_dials"),
            (DIALS, "test_a_listener_that_stood_still_and_cannot_be_attached_fails_the_dial"),
            (
                DIALS,
                "test_a_listener_that_dies_between_connecting_and_the_first_bytes_fails_the_dial",
            ),
            (STAGING, "test_the_sender_is_killed_with_staged_receives_under_way"),
            ("e2e/test_lost_workers.py", "test_a_worker_dies_under_twenty_requests"),
        ),
        "containers of one host with networks of their own but shared memory: a receiver that dies "
        "half a second after it was first reached can take the sender along, within UCX",
    ),
    "A8": Row(
        "completions of cancelled requests are dropped",
        (
            (SOAK, "test_transfers_leave_nothing_behind"),
            (
                "worker/test_host.py",
                "test_half_of_the_requests_are_cancelled_and_every_page_comes_home",
            ),
        ),
    ),
    "A9": Row(
        "time-outs are looked at only when a new request comes",
        (
            (PAUSES, "test_a_stopped_context_rank_writes_no_page_after_it_was_given_up"),
            ("transfer/test_agent_transfers.py", "test_deadlines_pass_without_traffic"),
            (
                "sim/test_transfer_worlds.py",
                "test_silence_ends_the_session_with_no_other_traffic",
            ),
        ),
    ),
    "A10": Row(
        "a burst of long prompts, half of them cancelled",
        (
            (STAGING, "test_a_burst_shares_the_buffers_of_a_pair_while_half_of_it_is_cancelled"),
            (LINKS, "test_a_burst_of_long_prompts_of_which_half_are_left"),
        ),
    ),
    "A11": Row(
        "a cancelled send ends the sender's loop",
        ((CANCELS, "test_a_context_rank_that_gives_up_tells_the_other"),),
    ),
    "A12": Row(
        "pages are evicted while they are sent",
        (
            ("kvcache_core/test_lease.py", "test_leased_pages_are_not_evicted_after_close"),
            (PAIR, "test_the_context_pool_may_be_smaller_than_the_queue_it_serves"),
            ("e2e/test_host_tier.py", "test_three_times_the_pools"),
        ),
    ),
    "A14": Row(
        "one failed request stalls every rank",
        (
            (RANKS, "test_what_one_rank_does_wrong_ends_its_request_on_all_and_no_other"),
            ("transfer/test_consensus.py", "test_every_request_ends_as_its_ranks_say"),
            ("transfer/test_agent_rank_faults.py", "test_cancel_at_every_stage_ends_all_ranks"),
            ("transfer/test_agent_rank_storm.py", "test_all_ranks_end_once_and_all_pages_go_home"),
        ),
    ),
    "A15": Row(
        "the receiver posts nothing for a while",
        (
            (PAUSES, "test_a_pause_shorter_than_the_silence_costs_nobody_anything"),
            (PAIR, "test_pools_of_two_prompts_serve_fifty_requests"),
        ),
    ),
    "A16": Row(
        "a deadline passes and the pages are written later",
        ((CANCELS, "test_deadlines_of_a_few_ms_end_requests_and_spoil_none"),),
    ),
    "A17": Row(
        "a late write spoils the next request's pages",
        (
            (CANCELS, "test_the_request_after_a_cancelled_one_has_its_pages_and_none_of_its_bytes"),
            (AGENTS, "test_cancelled_in_mid_transfer_is_clean_and_quick"),
            (
                "contracts/test_transport.py",
                "test_cancelled_after_matching_ends_only_when_nothing_more_is_written",
            ),
        ),
    ),
    "A18": Row(
        "versions differ",
        (
            (STRANGERS, "test_another_version_is_told_both_numbers"),
            (PEERS, "test_another_protocol_version_is_refused_with_both_numbers"),
        ),
    ),
    "A20": Row(
        "hours of aborts leak pages",
        (
            (SOAK, "test_transfers_leave_nothing_behind"),
            ("e2e/test_soak.py", "test_a_service_whose_clients_leave_keeps_nothing"),
            ("sim/test_request_flow.py", "test_random_worlds"),
        ),
        "half an hour at a stretch: run in pieces of two minutes so far",
    ),
    "A21": Row(
        "the receiver is not told that the sender failed",
        ((CANCELS, "test_a_context_rank_that_gives_up_tells_the_other"),),
    ),
    "A22": Row(
        "one leg fails and the other is held",
        (
            (
                "services/orchestration/test_flow.py",
                "test_rejection_wins_and_cancels_the_other_leg",
            ),
            (PAIR, "test_the_death_of_a_worker_ends_the_other_leg_and_loses_no_page"),
        ),
    ),
    "A23": Row(
        "more is admitted than there is room for",
        (
            (SERVICE, "test_full_service_refuses_with_a_time_to_retry"),
            ("worker/engine/test_scheduler.py", "test_admission_never_gives_more_than_there_is"),
        ),
    ),
    "A25": Row("as 6", ((DEATHS, "test_a_killed_context_rank_is_back_at_its_port"),)),
    "A26": Row(
        "prompts shorter than a block, and prompts of which all is there",
        (
            (AGENTS, "test_a_prompt_of_which_everything_or_all_but_a_block_is_there"),
            (PAIR, "test_a_pair_gives_what_one_worker_gives"),
            (PAIR, "test_a_prompt_that_is_wholly_there_moves_nothing"),
        ),
    ),
    "A28": Row(
        "a kind of pages is not sent and nobody says so",
        (
            (COMPATIBILITY, "test_mappings_and_kinds_are_compared"),
            (COMPATIBILITY, "test_draft_layers_must_be_the_same_where_both_have_them"),
        ),
    ),
    "A29": Row(
        "a pair that does not fit shows as a hang",
        (
            (STRANGERS, "test_a_peer_that_does_not_fit_is_told_both_values"),
            (PEERS, "test_a_pair_that_does_not_fit_is_refused_once_with_all_reasons"),
            (PEERS, "test_a_refusal_is_forgotten_with_the_process_that_it_was_about"),
            (
                "worker/engine/test_faults.py",
                "test_a_refused_peer_shows_and_leaves_the_worker_ready",
            ),
        ),
    ),
    "A31": Row(
        "a fall-back hides faults",
        (
            ("e2e/test_lost_workers.py", "test_a_lost_transfer_is_repaired_and_counted"),
            (SERVICE, "test_repairs_are_budgeted"),
        ),
    ),
    "B32": Row(
        "a peer restarted at the same address is taken for the old one",
        (
            (DEATHS, "test_a_killed_context_rank_is_back_at_its_port"),
            (DEATHS, "test_a_killed_generation_rank_is_back_at_its_port"),
            (PEERS, "test_a_restarted_worker_at_the_same_address_is_not_its_predecessor"),
            ("e2e/test_lost_workers.py", "test_a_worker_dies_under_twenty_requests"),
        ),
    ),
    "B34": Row(
        "the survivor holds memory of the dead",
        (
            (DEATHS, "test_peers_that_come_and_die_leave_nothing_in_the_survivor"),
            (DIALS, "test_what_was_given_up_as_it_began_leaves_nothing"),
            (PROCESSES, "test_an_endpoint_closed_with_a_message_under_way_lets_go_of_all_it_had"),
            (PROCESSES, "test_peers_killed_in_mid_transfer_break_nothing_for_the_next"),
        ),
        "memory of a GPU",
    ),
    "B35": Row(
        "a peer that is stopped is not noticed",
        (
            (PAUSES, "test_a_stopped_context_rank_writes_no_page_after_it_was_given_up"),
            (PAUSES, "test_a_stopped_generation_rank_takes_no_page_that_was_given_up"),
            (PAUSES, "test_what_waits_unread_for_a_stopped_generation_rank_is_right_or_refused"),
            (PAUSES, "test_a_stopped_context_rank_holds_up_nobody_who_dials_it"),
            (STORM, "test_cuts_and_stops_kill_no_rank"),
            (SERVICE, "test_silent_worker_is_suspected_then_lost_and_comes_back"),
        ),
    ),
    "B37": Row(
        "a broken connection passes wrong pages as right, or never heals",
        (
            (DEATHS, "test_a_connection_that_breaks_in_mid_transfer_is_made_anew"),
            (DIALS, "test_a_listener_hears_whoever_has_connected_before_it_goes"),
            (PEERS, "test_the_dial_of_a_pair_that_is_lost_is_given_up"),
            (PROCESSES, "test_a_receive_of_which_a_part_has_come_ends_with_its_endpoint"),
            ("transfer/test_control_link.py", "test_a_reset_connection_takes_words_and_drops_them"),
            (PEERS, "test_a_dead_transport_drops_its_peers_and_says_so"),
        ),
    ),
    "B39": Row("as 32", ((DEATHS, "test_a_killed_context_rank_is_back_at_its_port"),)),
    "C40": Row(
        "other tensor parallel sizes give wrong pages",
        (
            (RANKS, "test_every_byte_of_every_receiver_arrives"),
            (INSTANCES, "test_every_byte_of_every_receiver_arrives"),
            (GEOMETRIES, "test_every_byte_arrives_once_or_the_pair_is_refused"),
        ),
        ONE_RANK,
    ),
    "C41": Row(
        "parts are counted wrong where ranks hold the same heads",
        (
            (INSTANCES, "test_every_byte_of_every_receiver_arrives"),
            (INSTANCES, "test_any_two_instances_move_a_request"),
            (PLAN, "test_holders_of_one_head_share_the_receivers"),
        ),
        ONE_RANK,
    ),
    "C42": Row(
        "layers of a pipeline stage go to other layers",
        (
            (INSTANCES, "test_every_byte_of_every_receiver_arrives"),
            (PLAN, "test_layers_of_a_stage_touch_and_move_as_one_run"),
            ("sim/test_transfer_ranks.py", "test_both_ranks_move_their_part"),
        ),
        ONE_RANK,
    ),
    "C44": Row(
        "the receiver decodes what the sender has given up",
        (
            (CANCELS, "test_a_context_rank_that_gives_up_tells_the_other"),
            (SERVICE, "test_requests_that_no_worker_could_serve_are_refused_at_once"),
            (PAIR, "test_the_death_of_a_worker_ends_the_other_leg_and_loses_no_page"),
        ),
    ),
    "C45": Row(
        "pages of another type are taken for one's own",
        (
            (STRANGERS, "test_a_peer_that_does_not_fit_is_told_both_values"),
            (COMPATIBILITY, "test_a_changed_fact_gives_its_row"),
            (COMPATIBILITY, "test_a_layer_of_other_pages_gives_its_rows"),
        ),
    ),
    "C46": Row(
        "scales stay behind",
        (
            (GEOMETRIES, "test_a_model_of_all_kinds_of_layers"),
            (COMPATIBILITY, "test_a_changed_fact_gives_its_row"),
        ),
        "a worker with scaled pages: 200 tokens' log-probabilities against an aggregated one",
    ),
    "C48": Row(
        "a failed transfer of recurrent states ends more than its request",
        (
            ("transfer/test_agent_rank_storm.py", "test_all_ranks_end_once_and_all_pages_go_home"),
            (INSTANCES, "test_every_byte_of_every_receiver_arrives"),
        ),
        "a worker with a recurrent model",
    ),
    "C54": Row(
        "the receiver computes the prompt itself and nobody notices",
        (
            (
                "e2e/test_launch.py",
                "test_pages_travelled_and_the_generation_worker_prefilled_nothing",
            ),
            (
                "e2e/test_conversation.py",
                "test_ten_turns_compute_and_transfer_only_what_is_missing",
            ),
        ),
    ),
    "D56": Row(
        "decoding goes on where the first token was the last",
        (
            (PAIR, "test_a_first_token_that_stops_is_the_last"),
            (PAIR, "test_a_request_of_one_token_needs_no_generation_leg"),
            ("transfer/test_agent_rank_faults.py", "test_nothing_to_decode_is_told_once"),
        ),
    ),
    "K114": Row(
        "what was transferred is reported as cached",
        (
            ("e2e/test_host_tier.py", "test_three_times_the_pools"),
            (
                "services/orchestration/test_service.py",
                "test_cached_tokens_are_those_of_the_context_leg",
            ),
        ),
    ),
    "M125": Row(
        "the drafter's pages stay behind",
        (
            (RANKS, "test_every_byte_of_every_receiver_arrives"),
            (GEOMETRIES, "test_named_pairs_are_accepted"),
            (PLAN, "test_who_drafts_alone_is_told"),
        ),
        "acceptance of a pair against that of an aggregated worker",
    ),
    "M132": Row(
        "the thread of transfers dies and the worker reads healthy",
        (
            (
                "worker/test_host.py",
                "test_a_worker_whose_thread_of_transfers_dies_ends_and_says_why",
            ),
            (RANKS, "test_a_rank_whose_thread_of_transfers_dies_says_so_and_ends_all"),
            (PEERS, "test_a_dead_transport_drops_its_peers_and_says_so"),
        ),
    ),
    "L120": Row(
        "buffers of transfers are in no budget",
        (
            (
                "transfer/test_agent_staging.py",
                "test_sessions_that_want_more_buffers_than_there_are_all_finish",
            ),
            (SOAK, "test_transfers_leave_nothing_behind"),
            ("services/launch/test_resources.py", "test_instances_share_gpus"),
        ),
        "on the host staging (four buffers of 16 MiB a pair and side) is in no quota; KV caches "
        "take a quarter of the free memory",
    ),
    "L121": Row(
        "a slow transport is used silently",
        (
            (PROCESSES, "test_a_required_transport_is_not_replaced_silently"),
            (AGENTS, "test_requests_one_after_another_and_together"),
            ("services/launch/test_doctor.py", "test_measures_the_transport_between_two_processes"),
            (
                "services/orchestration/test_metrics.py",
                "test_pairs_are_counted_by_the_transport_that_carries_pages",
            ),
            (LINKS, "test_fifty_requests_on_a_decode_pool_of_two_prompts"),
            (
                "e2e/test_conversation.py",
                "test_ten_turns_compute_and_transfer_only_what_is_missing",
            ),
        ),
    ),
    "L122": Row(
        "first requests pay for the connection",
        (
            ("transfer/test_warm_pairs.py", "test_the_first_request_dials_nothing"),
            (ARRIVALS, "test_the_service_starts_when_its_pairs_are_connected"),
            (
                ARRIVALS,
                "test_a_returning_worker_gets_requests_when_it_is_connected_and_others_serve",
            ),
            (LINKS, "test_fifty_requests_on_a_decode_pool_of_two_prompts"),
            (PEERS, "test_warming_connects_ahead"),
        ),
        "a peer's GPU memory is opened with the first message, which nothing sends ahead",
    ),
    "L124": Row(
        "many small messages where layouts differ",
        (
            (STAGING, "test_fragmented_slots_arrive_whole"),
            (STAGING, "test_other_page_sizes_are_laid_out_anew"),
            (RANKS, "test_every_byte_of_every_receiver_arrives"),
        ),
        "half the GB/s of equal tp at tp 2 to 1: benchmarks.transfer measures less from 8k tokens "
        "(0.37 to 0.42 on CPU, 0.2 to 0.4 on one H200, 0.2 between two)",
    ),
    "S1": Row("a wrong cluster token", ((STRANGERS, "test_a_wrong_cluster_token_is_told"),)),
    "S2": Row(
        "garbage on a port",
        (
            (STRANGERS, "test_garbage_on_the_control_port"),
            (STRANGERS, "test_garbage_and_half_open_connections_on_the_data_port"),
            (STRANGERS, "test_a_dialler_without_the_opening_gets_no_endpoint"),
        ),
    ),
    "S3": Row(
        "connections that say nothing",
        (
            (
                STRANGERS,
                "test_half_open_connections_hold_up_nobody_who_has_something_to_say",
            ),
            (STRANGERS, "test_garbage_and_half_open_connections_on_the_data_port"),
        ),
    ),
    "S4": Row(
        "a port that is taken",
        ((STRANGERS, "test_a_control_port_that_is_taken_is_told_and_leaves_nothing"),),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_are_there(row: str) -> None:
    """A renamed test leaves its row uncovered."""
    assert ROWS[row].tests
    for file, name in ROWS[row].tests:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}: {name}"
