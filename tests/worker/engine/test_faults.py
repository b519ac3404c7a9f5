"""What breaks: links, workers, grants, the engine itself; and what an idle engine does: nothing."""

from __future__ import annotations

import threading

import pytest

from tests.support.sim_engines import (
    VOCAB,
    SimWorld,
    WorkerShape,
    expected,
    generate,
    prefill,
)
from transfer.agent_events import GrantReceived, HandoffReceived, SessionEnded
from transfer.identity import Incarnation
from transfer.messages import ChoiceHandoff, HandoffData
from transfer.outcome import Outcome
from worker.inbox import FrontEndCommand, FrontEndJoined, FrontEndLost, Inbox, Shutdown
from worker.messages import Cancel

PROMPT = list(range(60))


def moving_pair(limit: int = 1000, grace_ms: int = 1000) -> SimWorld:
    """A world in which pages are under way from a context to a generation worker."""
    world = SimWorld(3)
    context = world.worker("context", WorkerShape(max_batch_tokens=8))
    shape = WorkerShape(quarantine_limit_blocks=limit, quarantine_grace_ms=grace_ms)
    generation = world.worker("generation", shape)
    world.network.max_delay_ms = 300
    world.send(context, prefill("r", PROMPT, generation.incarnation))
    world.send(generation, generate("r", PROMPT, source=context.address))
    world.run_until(lambda: world.network.moved_slots > 0)
    return world


def test_pages_in_doubt_stay_out_of_use_until_the_peer_is_known_dead() -> None:
    world = moving_pair()
    context, generation = world.workers
    world.network.cut(context, generation)
    world.run_until(lambda: generation.gauges is not None and generation.gauges.quarantined_blocks)
    assert world.ended(generation, "generation", "r").retryable
    while world.step():
        pass
    assert generation.gauges is not None
    quarantined = generation.gauges.quarantined_blocks
    assert quarantined > 0
    assert generation.available == generation.shape.slots - quarantined
    generation.manager.check()
    # The others go on with what is left.
    other = [5, 6, 7]
    world.send(generation, generate("s", other))
    while world.step():
        pass
    assert world.choices["s", 0].tokens == expected(other)
    world.network.certify(context)
    world.drain()
    assert generation.gauges.quarantined_blocks == 0


def test_too_many_pages_in_doubt_make_the_worker_unready_until_the_doubt_is_over() -> None:
    world = moving_pair(limit=1)
    context, generation = world.workers
    world.network.cut(context, generation)
    world.run_until(lambda: generation.gauges is not None and not generation.gauges.ready)
    assert generation.gauges is not None
    assert "quarantine" in generation.gauges.reason
    assert generation.engine.stopped is None
    world.network.certify(context)
    world.drain()
    assert generation.gauges.ready
    assert generation.engine.stopped is None


def test_too_many_pages_in_doubt_for_too_long_end_the_worker() -> None:
    world = moving_pair(limit=1, grace_ms=20)
    context, generation = world.workers
    world.send(generation, generate("other", [1, 2, 3], max_tokens=100))
    world.network.cut(context, generation)
    world.run_until(lambda: generation.gauges is not None and not generation.gauges.ready)
    unready_at_ms = world.clock.now_ms()
    world.run_until(lambda: generation.engine.stopped)
    waited_ms = world.clock.now_ms() - unready_at_ms
    assert abs(waited_ms - generation.shape.quarantine_grace_ms) <= 100
    assert "quarantine" in (generation.engine.stopped or "")
    ended = world.ended(generation, "generation", "other")
    assert (ended.outcome, ended.code, ended.retryable) == ("failed", "worker_failed", True)
    assert generation.gauges is not None
    assert not generation.gauges.ready


def test_a_lost_front_end_takes_its_requests_along_and_no_others() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("gone", [1, 2, 3], max_tokens=100), connection=1)
    world.send(worker, generate("stays", [4, 5, 6]), connection=2)
    world.run_until(lambda: ("gone", 0) in world.choices)
    worker.inbox.append(FrontEndLost(1))
    world.accepted.clear()
    world.drain()
    assert world.choices["stays", 0].tokens == expected([4, 5, 6])
    assert ("w", "generation", "gone") not in world.legs or not world.legs[
        "w", "generation", "gone"
    ].ended


def test_a_grant_of_the_wrong_worker_is_not_taken() -> None:
    world = SimWorld()
    context = world.worker("context")
    generation = world.worker("generation")
    stranger = Incarnation.mint("stranger")
    world.send(context, prefill("r", PROMPT, generation.incarnation, deadline_ms=500))
    context.hear(GrantReceived("r", stranger))
    context.hear(SessionEnded("r", Outcome.CANCELLED, "refused", 0, 0))
    world.drain()
    assert context.executor.batches == []
    assert world.ended(context, "context", "r").outcome == "failed"


@pytest.mark.parametrize("tokens", [(VOCAB,), (1, 1), ()])
def test_first_tokens_that_are_none_end_their_request_alone(tokens: tuple[int, ...]) -> None:
    """The model would look them up, and end the worker."""
    world = moving_pair()
    _, generation = world.workers
    other = [5, 6, 7]
    world.send(generation, generate("other", other))
    choices = tuple(ChoiceHandoff(token=token) for token in tokens)
    generation.hear(HandoffReceived("r", HandoffData(choices=choices, cached_tokens=0)))
    world.drain()
    ended = world.ended(generation, "generation", "r")
    assert (ended.outcome, ended.code) == ("failed", "bad_handoff")
    assert world.choices["other", 0].tokens == expected(other)


def test_a_request_whose_old_transfer_is_still_ending_may_be_tried_again_later() -> None:
    world = SimWorld()
    context = world.worker("context")
    generation = world.worker("generation")
    message = generate("r", PROMPT, source=context.address)
    world.send(generation, message)
    world.step()
    # Nothing of the network runs here: the session is open when the same id comes again.
    generation.inbox += [
        FrontEndCommand(1, Cancel(request_id="r")),
        FrontEndCommand(1, message),
    ]
    generation.turn()
    ended = world.legs["generation", "generation", "r"].ended
    assert [one.outcome for one in ended] == ["cancelled", "failed"]
    assert (ended[1].code, ended[1].retryable) == ("session_busy", True)
    world.accepted.clear()
    world.drain()


def test_a_welcomed_front_end_is_told_how_the_worker_is() -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.drain()
    told = len(worker.gauges_seen)
    worker.inbox.append(FrontEndJoined(1))
    world.drain()
    assert len(worker.gauges_seen) == told + 1
    assert worker.gauges_seen[-1].ready


def test_a_refused_peer_shows_and_leaves_the_worker_ready() -> None:
    world = SimWorld()
    worker = world.worker("w")
    worker.transfers.refused["g@1"] = ("kv_dtype: ours float32, theirs bfloat16",)
    world.drain()
    assert worker.gauges is not None
    assert worker.gauges.ready
    assert worker.gauges.reason == "refused g@1: kv_dtype: ours float32, theirs bfloat16"


def test_the_engine_sleeps_until_it_is_needed_and_stops_when_told() -> None:
    world = SimWorld()
    worker = world.worker("w")
    inbox = Inbox()
    reasons: list[str] = []
    turns = 0
    turn = worker.engine.turn

    def counted(items: list[object]) -> bool:
        nonlocal turns
        turns += 1
        return turn(items)  # type: ignore[arg-type]

    worker.engine.turn = counted  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=lambda: reasons.append(worker.engine.run(inbox)))
    thread.start()
    inbox.put(FrontEndCommand(1, generate("r", [1, 2, 3], max_tokens=4)))
    deadline = threading.Event()
    while ("r", 0) not in world.choices or world.choices["r", 0].finish is None:
        assert not deadline.wait(0.001)
    deadline.wait(0.05)
    busy = turns
    deadline.wait(0.2)
    assert turns == busy, "an idle engine goes round"
    assert worker.engine.heartbeat.age_ms(10**9) == 0
    inbox.put(Shutdown("enough"))
    thread.join(10)
    assert reasons == ["enough"]


@pytest.mark.parametrize("stage", ["queued", "running"])
def test_told_to_stop_it_ends_every_leg_first(stage: str) -> None:
    world = SimWorld()
    worker = world.worker("w")
    world.send(worker, generate("r", [1, 2, 3], max_tokens=100))
    if stage == "running":
        world.run_until(lambda: ("r", 0) in world.choices)
    worker.inbox.append(Shutdown("maintenance"))
    world.send(worker, generate("too late", [1, 2, 3]))
    world.step()
    assert world.ended(worker, "generation", "too late").retryable
    ended = world.ended(worker, "generation", "r")
    assert (ended.code, ended.message, ended.retryable) == ("worker_failed", "maintenance", True)
    assert worker.engine.stopped == "maintenance"
    worker.manager.check()
    assert worker.available == worker.shape.slots
