"""Gauges of a worker that has done nothing, for tests to build on."""

from __future__ import annotations

from typing import Final

from worker.interpreter import WAIT_CLASSES
from worker.messages import WorkerGauges

IDLE_GAUGES: Final = WorkerGauges(
    ready=True,
    total_blocks=1000,
    free_blocks=1000,
    cached_blocks=0,
    running=0,
    waiting=0,
    suspended=0,
    transfers_in_flight=0,
    quarantined_blocks=0,
    prefill_tokens_total=0,
    decode_tokens_total=0,
    cached_tokens_total=0,
    transferred_bytes_total=0,
    transferred_blocks_total=0,
    preemptions_total=0,
    steps_total=0,
    host_cached_tokens_total=0,
    evicted_pages_total=0,
    demoted_pages_total=0,
    onboarded_pages_total=0,
    pulls_succeeded_total=0,
    pulls_declined_total=0,
    pulls_failed_total=0,
    pulls_served_total=0,
    pulled_tokens_total=0,
    pairs=(),
    late_dials_total=0,
    transfer_busy_ms_total=0,
    transfer_busy_bytes_total=0,
    staged_bytes_total=0,
    staging_bytes=0,
    interpreter_waits=(0,) * WAIT_CLASSES,
    interpreter_waited_us=0,
)
