"""The state of a worker as front ends see it, read off the desk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transfer.agent_figures import PairState
from transfer.agent_pair import Side
from worker.desk import Desk
from worker.interpreter import Interpreter
from worker.messages import TransferPair, WorkerGauges
from worker.requests import LegState, SequenceState

_WAITING: Final = frozenset(
    {
        LegState.AWAITING_GRANT,
        LegState.AWAITING_ROOM,
        LegState.GRANTED,
        LegState.LANDING,
        LegState.PULL_WAITING,
        LegState.PULLING,
        LegState.PULL_RECEIVING,
    }
)


def read_gauges(desk: Desk, interpreter: Interpreter, trouble: str) -> WorkerGauges:
    """The state of the worker now. ``trouble`` is empty while it is ready.

    Peers that were refused do not make it unready, but the reason tells of them.
    """
    states = [sequence.state for sequence in desk.sequences.values()]
    waiting = sum(leg.state in _WAITING for leg in desk.legs)
    counters = desk.counters
    blocks = desk.manager.block_counts()
    totals = desk.manager.totals()
    figures = desk.transfers.figures
    return WorkerGauges(
        ready=not trouble,
        reason=trouble or _refusals(desk.transfers.refusals),
        total_blocks=blocks.total,
        free_blocks=blocks.available,
        cached_blocks=blocks.cached,
        running=states.count(SequenceState.RUNNING),
        waiting=waiting + states.count(SequenceState.QUEUED) + states.count(SequenceState.HELD),
        suspended=states.count(SequenceState.SUSPENDED),
        transfers_in_flight=desk.leases.sessions_open,
        quarantined_blocks=desk.leases.quarantined_blocks,
        prefill_tokens_total=counters.prefill_tokens,
        decode_tokens_total=counters.decode_tokens,
        cached_tokens_total=counters.cached_tokens,
        transferred_bytes_total=counters.transferred_bytes,
        transferred_blocks_total=counters.transferred_blocks,
        preemptions_total=counters.preemptions,
        steps_total=counters.steps,
        host_cached_tokens_total=counters.host_cached_tokens,
        evicted_pages_total=totals.evicted_pages,
        demoted_pages_total=totals.demoted_pages,
        onboarded_pages_total=totals.onboarded_pages,
        pulls_succeeded_total=counters.pulls_succeeded,
        pulls_declined_total=counters.pulls_declined,
        pulls_failed_total=counters.pulls_failed,
        pulls_served_total=counters.pulls_served,
        pulled_tokens_total=counters.pulled_tokens,
        pairs=tuple(_told(pair) for pair in figures.pairs),
        late_dials_total=figures.late_dials,
        transfer_busy_ms_total=figures.busy_ms,
        transfer_busy_bytes_total=figures.busy_bytes,
        staged_bytes_total=figures.staged_bytes,
        staging_bytes=figures.staging_bytes,
        interpreter_waits=interpreter.waits,
        interpreter_waited_us=interpreter.waited_us,
    )


def _refusals(refusals: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"refused {peer}: {', '.join(why)}" for peer, why in refusals.items())


def _told(pair: PairState) -> TransferPair:
    return TransferPair(
        side="context" if pair.side is Side.CONTEXT else "generation",
        peer=pair.peer.incarnation,
        rank=pair.peer.rank,
        lane=pair.lane,
        reason=pair.reason,
    )
