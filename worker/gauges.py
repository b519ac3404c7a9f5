"""The state of a worker as front ends see it, read off the desks of its dp groups."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values
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


def read_gauges(
    desks: Values[Desk], unplaced: int, interpreter: Interpreter, trouble: str
) -> WorkerGauges:
    """The state of the worker now, all its dp groups together. ``unplaced`` requests are in none;
    ``trouble`` is empty while it is ready.

    Peers that were refused do not make it unready, but the reason tells of them.
    """
    states = [sequence.state for desk in desks for sequence in desk.sequences.values()]
    waiting = unplaced + sum([leg.state in _WAITING for desk in desks for leg in desk.legs])
    counters = desks[0].counters
    blocks = [desk.manager.block_counts() for desk in desks]
    totals = [desk.manager.totals() for desk in desks]
    figures = desks[0].transfers.figures
    return WorkerGauges(
        ready=not trouble,
        reason=trouble or _refusals(desks[0].transfers.refusals),
        total_blocks=sum([one.total for one in blocks]),
        free_blocks=sum([one.available for one in blocks]),
        cached_blocks=sum([one.cached for one in blocks]),
        running=states.count(SequenceState.RUNNING),
        waiting=waiting + states.count(SequenceState.QUEUED) + states.count(SequenceState.HELD),
        suspended=states.count(SequenceState.SUSPENDED),
        transfers_in_flight=sum([desk.leases.sessions_open for desk in desks]),
        quarantined_blocks=sum([desk.leases.quarantined_blocks for desk in desks]),
        prefill_tokens_total=counters.prefill_tokens,
        decode_tokens_total=counters.decode_tokens,
        cached_tokens_total=counters.cached_tokens,
        transferred_bytes_total=counters.transferred_bytes,
        transferred_blocks_total=counters.transferred_blocks,
        preemptions_total=counters.preemptions,
        steps_total=counters.steps,
        host_cached_tokens_total=counters.host_cached_tokens,
        evicted_pages_total=sum([one.evicted_pages for one in totals]),
        demoted_pages_total=sum([one.demoted_pages for one in totals]),
        onboarded_pages_total=sum([one.onboarded_pages for one in totals]),
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
