"""The transition table of a request, and the orders of events that matter most."""

from __future__ import annotations

from typing import get_args

import pytest

from services.orchestration.api import ChoiceFinished, Completed, Failed, TokenDelta
from services.orchestration.flow import MAX_REPAIRS, TRANSITIONS, FlowPlan, RequestFlow
from services.orchestration.flow_states import (
    Begin,
    CancelLegs,
    CancelRequested,
    DeadlinePassed,
    Emit,
    FindWorker,
    FlowCommand,
    FlowEvent,
    FlowState,
    Forget,
    InvalidTransition,
    LegReport,
    ReleasePrefill,
    ReleaseSequence,
    StartGenerate,
    StartPrefill,
    StopChoice,
    StopRequested,
    WorkerFound,
    WorkerJoined,
    WorkerLost,
    WorkerMissing,
)
from transfer.identity import Incarnation
from transfer.wire import pack_ints
from worker.messages import Leg, LegEnded, LegStarted
from worker.token_runs import TokenRun

CONTEXT = Incarnation(instance="context-0", nonce="a")
GENERATION = Incarnation(instance="generation-0", nonce="b")
OTHER = Incarnation(instance="generation-1", nonce="c")

ONLY_WHILE_SEEKING = {WorkerFound, WorkerMissing}


def make_flow(
    *,
    n: int = 1,
    context: Incarnation | None = CONTEXT,
    generation: Incarnation | None = GENERATION,
) -> RequestFlow:
    plan = FlowPlan(request_id="r", prompt_tokens=10, n=n, context=context, generation=generation)
    flow = RequestFlow(plan)
    flow.handle(Begin())
    return flow


def run(index: int, *tokens: int, leg: str = "r", choice: int = 0, last: bool = False) -> TokenRun:
    return TokenRun(
        request_id=leg,
        choice=choice,
        start=index,
        tokens=pack_ints(tokens),
        finish="length" if last else None,
    )


def ended(kind: Leg, outcome: str = "succeeded", *, leg: str = "r", **facts: object) -> LegEnded:
    return LegEnded.model_validate(
        {"request_id": leg, "leg": kind, "outcome": outcome, "retryable": True, **facts}
    )


def started(kind: Leg, cached: int, *, leg: str = "r") -> LegStarted:
    return LegStarted(request_id=leg, leg=kind, prompt_tokens=10, cached_tokens=cached)


def emitted(commands: tuple[FlowCommand, ...]) -> list[object]:
    return [command.event for command in commands if isinstance(command, Emit)]


def kinds(commands: tuple[FlowCommand, ...]) -> list[type]:
    return [type(command) for command in commands]


def test_the_table_names_every_pair_that_can_happen() -> None:
    for state in FlowState:
        for event in get_args(FlowEvent):
            if event is Begin:
                possible = state is FlowState.NEW
            elif state is FlowState.NEW:
                possible = False
            elif event in ONLY_WHILE_SEEKING:
                possible = state is FlowState.SEEKING
            else:
                possible = True
            assert ((state, event) in TRANSITIONS) == possible, (state, event)


def test_an_impossible_event_raises_with_the_story() -> None:
    flow = make_flow()
    with pytest.raises(InvalidTransition, match=r"WorkerFound.*prefilling.*Begin"):
        flow.handle(WorkerFound(GENERATION))


def test_both_legs_start_at_once() -> None:
    plan = FlowPlan(request_id="r", prompt_tokens=10, n=1, context=CONTEXT, generation=GENERATION)
    commands = RequestFlow(plan).handle(Begin())
    assert commands == (
        StartPrefill(CONTEXT, "r", GENERATION),
        StartGenerate(GENERATION, "r", CONTEXT),
    )


def test_one_token_needs_no_generation_leg() -> None:
    flow = make_flow(generation=None)
    report = LegReport(CONTEXT, (started("context", 4),), (run(0, 5, last=True),))
    commands = flow.handle(report)
    assert emitted(commands) == [
        TokenDelta(0, 0, (5,)),
        ChoiceFinished(0, "length"),
        Completed(10, 4, (1,)),
    ]
    assert flow.state is FlowState.DRAINING
    assert kinds(flow.handle(LegReport(CONTEXT, ended=(ended("context"),)))) == [Forget]


def test_prefill_is_released_at_the_first_token_and_the_sequence_at_the_end() -> None:
    flow = make_flow()
    first = flow.handle(LegReport(CONTEXT, (started("context", 0),), (run(0, 5),)))
    assert kinds(first)[0] is ReleasePrefill
    last = flow.handle(
        LegReport(GENERATION, (), (run(0, 5, 6, last=True),), (ended("generation"),))
    )
    assert kinds(last).count(ReleaseSequence) == 1
    assert ReleasePrefill not in kinds(last)


def test_context_lost_before_the_hand_over_is_repaired_with_what_is_out() -> None:
    flow = make_flow()
    flow.handle(LegReport(CONTEXT, (started("context", 3),), (run(0, 5),)))
    commands = flow.handle(WorkerLost(CONTEXT))
    assert CancelLegs(GENERATION, "r") in commands
    assert commands[-1] == FindWorker("r.1", GENERATION, frozenset())
    assert flow.handle(WorkerFound(GENERATION)) == (
        StartGenerate(GENERATION, "r.1", None, ((5,),), ()),
    )
    # What the given-up leg still says does not count, whatever it is.
    late = flow.handle(LegReport(GENERATION, (), (run(0, 5, 77),)))
    assert late == ()
    done = flow.handle(
        LegReport(
            GENERATION,
            (started("generation", 9, leg="r.1"),),
            (run(1, 6, leg="r.1", last=True),),
            (ended("generation", leg="r.1"),),
        )
    )
    assert emitted(done)[-1] == Completed(10, 3, (2,), 0, repaired=True)


def test_context_lost_after_decoding_began_changes_nothing() -> None:
    flow = make_flow()
    flow.handle(LegReport(CONTEXT, (started("context", 3),), (run(0, 5),)))
    flow.handle(LegReport(GENERATION, (), (run(0, 5, 6),)))
    assert flow.handle(WorkerLost(CONTEXT)) == ()
    assert flow.state is FlowState.DECODING


def test_a_late_generation_success_without_tokens_waits_for_the_context() -> None:
    flow = make_flow()
    assert flow.handle(LegReport(GENERATION, ended=(ended("generation"),))) == ()
    commands = flow.handle(
        LegReport(CONTEXT, (started("context", 0),), (run(0, 5, last=True),), (ended("context"),))
    )
    assert isinstance(emitted(commands)[-1], Completed)
    assert flow.state is FlowState.DONE


def test_a_slow_context_connection_holds_back_usage_only() -> None:
    flow = make_flow()
    commands = flow.handle(
        LegReport(GENERATION, (), (run(0, 5, 6, last=True),), (ended("generation"),))
    )
    assert emitted(commands) == [TokenDelta(0, 0, (5, 6)), ChoiceFinished(0, "length")]
    assert flow.state is FlowState.FINISHING
    commands = flow.handle(
        LegReport(CONTEXT, (started("context", 8),), (run(0, 5),), (ended("context"),))
    )
    assert emitted(commands) == [Completed(10, 8, (2,))]


def test_rejection_wins_and_cancels_the_other_leg() -> None:
    flow = make_flow()
    commands = flow.handle(
        LegReport(CONTEXT, ended=(ended("context", "rejected", code="bad", message="no"),))
    )
    assert emitted(commands) == [Failed("bad", "no", 400)]
    assert CancelLegs(GENERATION, "r") in commands


def test_repairs_avoid_workers_on_which_a_repair_failed() -> None:
    flow = make_flow(context=None)
    commands = flow.handle(LegReport(GENERATION, ended=(ended("generation", "failed"),)))
    assert commands[-1] == FindWorker("r.1", None, frozenset({GENERATION}))
    flow.handle(WorkerFound(OTHER))
    for number in range(2, MAX_REPAIRS + 1):
        leg = f"r.{number - 1}"
        commands = flow.handle(LegReport(OTHER, ended=(ended("generation", "failed", leg=leg),)))
        assert commands[-1] == FindWorker(f"r.{number}", None, frozenset({GENERATION, OTHER}))
        flow.handle(WorkerFound(OTHER))
    commands = flow.handle(
        LegReport(OTHER, ended=(ended("generation", "failed", leg=f"r.{MAX_REPAIRS}"),))
    )
    failed = emitted(commands)[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "repair_failed"


def test_a_seeking_request_asks_again_when_a_worker_joins() -> None:
    flow = make_flow()
    flow.handle(WorkerLost(GENERATION))
    assert flow.handle(WorkerMissing()) == ()
    assert flow.handle(WorkerJoined()) == (FindWorker("r.1", GENERATION, frozenset()),)
    flow.handle(WorkerMissing())
    failed = emitted(flow.handle(DeadlinePassed()))[0]
    assert isinstance(failed, Failed)
    assert failed.http_status == 503


def test_stopping_one_choice_is_told_to_the_workers_and_the_last_one_cancels() -> None:
    flow = make_flow(n=2)
    runs = (run(0, 5), run(0, 6, choice=1))
    flow.handle(LegReport(CONTEXT, (started("context", 0),), runs, (ended("context"),)))
    commands = flow.handle(StopRequested(0, 1))
    assert StopChoice(GENERATION, "r", 0, 1) in commands
    commands = flow.handle(StopRequested(1, 0))
    assert CancelLegs(GENERATION, "r") in commands
    assert emitted(commands)[-1] == Completed(10, 0, (1, 0))


def test_cancel_ends_everything_once() -> None:
    flow = make_flow()
    commands = flow.handle(CancelRequested())
    assert kinds(commands).count(ReleasePrefill) == 1
    assert kinds(commands).count(ReleaseSequence) == 1
    assert len(emitted(commands)) == 1
    assert flow.handle(CancelRequested()) == ()
    assert flow.handle(StopRequested(0, 0)) == ()
    flow.handle(LegReport(CONTEXT, ended=(ended("context", "cancelled"),)))
    assert Forget() in flow.handle(WorkerLost(GENERATION))


def test_no_decode_whose_context_dies_afterwards_frees_the_generation_leg() -> None:
    flow = make_flow()
    flow.handle(LegReport(CONTEXT, (started("context", 0),), (run(0, 5, last=True),)))
    assert flow.state is FlowState.DRAINING
    assert flow.handle(WorkerLost(CONTEXT)) == (CancelLegs(GENERATION, "r"),)


def test_abort_releases_everything_in_any_state() -> None:
    flow = make_flow()
    commands = flow.abort("a bug")
    assert kinds(commands).count(Forget) == 1
    assert {ReleasePrefill, ReleaseSequence} <= set(kinds(commands))
    assert flow.abort("again") == ()
