"""Transfer sessions under faults: seeds of random weather, and a named matrix of cancellations."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.sim.transfer_network import Weather
from tests.sim.transfer_pages import FRAGMENTED, MIXED, WHOLE, Terrain
from tests.sim.transfer_world import CONTEXT, GENERATION, Rank, Script, World
from transfer import staging_buffers
from transfer.outcome import Outcome
from transfer.session import Session, SessionState

SEEDS = range(200)
FAIR = Weather()
TERRAINS = {"whole": WHOLE, "fragmented": FRAGMENTED, "mixed": MIXED}


@pytest.fixture(params=TERRAINS)
def terrain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terrain:
    """Where something is staged, it has to wait for one of two small buffers."""
    monkeypatch.setattr(staging_buffers, "STAGING_BUFFERS", 2)
    return TERRAINS[request.param]


def random_script(rng: random.Random) -> Script:
    prompt_blocks = rng.randint(1, 9)
    deeds = []
    for side in (CONTEXT, GENERATION):
        if rng.random() < 0.25:
            deeds.append((side, rng.randint(0, 250), rng.choice(("cancel", "fail"))))
    return Script(
        prompt_blocks=prompt_blocks,
        cached_blocks=rng.randint(0, prompt_blocks),
        chunk_blocks=rng.randint(1, 4),
        chunk_ms=rng.choice((0, 5, 30, 80)),
        deadline_ms=rng.choice((60, 200, 20_000, 20_000, 20_000)),
        no_decode=rng.random() < 0.15,
        deeds=tuple(deeds),
    )


def random_faults(world: World, rng: random.Random) -> None:
    for _ in range(rng.randint(0, 3)):
        rank = rng.choice(world.ranks)
        at_ms = rng.randint(0, 900)
        match rng.choice(("kill", "drop", "pause")):
            case "kill":
                world.clock.after(at_ms, partial(world.kill, rank))
            case "drop":
                world.clock.after(at_ms, partial(world.drop_links, rank))
            case _:
                pause_ms = rng.choice((50, 300, 900, 2_500))
                world.clock.after(at_ms, partial(world.pause, rank, pause_ms))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_session_ends_once_and_no_page_is_touched_after_reuse(
    seed: int, terrain: Terrain
) -> None:
    rng = random.Random(f"script {seed}")
    weather = Weather(
        delay_ms=(0, rng.choice((1, 20, 120))),
        copy_chance=rng.choice((0.0, 0.3)),
        move_ms=(0, rng.choice((5, 60, 400))),
    )
    world = World(seed, weather, terrain=terrain)
    world.deaths_are_known = rng.random() < 0.7
    for number in range(rng.randint(4, 14)):
        script = random_script(rng)
        pair = rng.choice(world.contexts), rng.choice(world.generations)
        world.clock.after(
            rng.randint(0, 600),
            partial(world.start, f"r{number}", script, *pair),
        )
    random_faults(world, rng)
    world.clock.run()
    world.check()


def test_without_faults_every_request_is_received_and_all_pages_are_free(
    terrain: Terrain,
) -> None:
    world = World(1, Weather(copy_chance=0.5), slots=12, terrain=terrain)
    for number in range(20):
        script = Script(prompt_blocks=1 + number % 8, cached_blocks=number % 3)
        script.cached_blocks = min(script.cached_blocks, script.prompt_blocks)
        world.start(f"r{number}", script, world.contexts[number % 2], world.generations[0])
    world.clock.run()
    world.check()
    assert {end.outcome for rank in world.ranks for end in rank.outcomes.values()} == {
        Outcome.SUCCEEDED
    }
    assert world.handoffs.total() == 20
    assert not any(rank.pages.owners() for rank in world.ranks)


STATES = {
    CONTEXT: (
        SessionState.GRANTED,
        SessionState.ANNOUNCED,
        SessionState.COMPUTED,
        SessionState.SHIPPING,
        SessionState.HANDED_OFF,
        SessionState.CLOSING,
        SessionState.CLOSED,
    ),
    GENERATION: (
        SessionState.GRANTED,
        SessionState.ANNOUNCED,
        SessionState.RECEIVING,
        SessionState.COMPLETING,
        SessionState.CLOSING,
        SessionState.CLOSED,
    ),
}
FAULTS = ("none", "context dies", "generation dies", "lost", "duplicate", "late")
MATRIX = [
    pytest.param(side, state, fault, id=f"cancel-{name}-{state.value}-{fault}".replace(" ", "-"))
    for side, name in ((CONTEXT, "context"), (GENERATION, "generation"))
    for state in STATES[side]
    for fault in FAULTS
]


@pytest.mark.parametrize(("side", "state", "fault"), MATRIX)
def test_cancel_at_each_state_with_each_fault(
    side: int, state: SessionState, fault: str, terrain: Terrain
) -> None:
    reached = False
    for seed in range(12):
        weather = Weather(
            delay_ms=(40, 200) if fault == "late" else (0, 20),
            copy_chance=1.0 if fault == "duplicate" else 0.0,
            move_ms=(0, 150),
        )
        world = World(seed, weather, ranks=1, terrain=terrain)
        done: list[bool] = []

        def strike(
            rank: Rank, session: Session, world: World = world, done: list[bool] = done
        ) -> None:
            if done or rank.side != side or session.state is not state:
                return
            done.append(True)
            world.clock.after(0, lambda: world.act(rank, session.request_id, "cancel"))
            if fault == "context dies":
                world.clock.after(0, lambda: world.kill(world.contexts[0]))
            elif fault == "generation dies":
                world.clock.after(0, lambda: world.kill(world.generations[0]))
            elif fault == "lost":
                world.clock.after(0, lambda: world.drop_links(rank))

        world.watch.append(strike)
        # Prefill that ends before the pages are known shows the COMPUTED state.
        chunk_ms = 0 if state is SessionState.COMPUTED else 30 + max(weather.delay_ms)
        # Without a handoff to wait for, the session closes while pages are still moving.
        script = Script(prompt_blocks=8, chunk_ms=chunk_ms, no_decode=state is SessionState.CLOSING)
        world.start("r", script, world.contexts[0], world.generations[0])
        world.clock.run()
        world.check()
        reached = reached or bool(done)
        if fault in ("none", "duplicate"):
            # Cancelled transfers drain: nobody has to break the connection to get pages back.
            assert not world.drops
            assert not any(rank.pages.owners() for rank in world.ranks)
    assert reached, f"no seed reached {state.value}"


@pytest.mark.parametrize("side", [CONTEXT, GENERATION])
def test_cancel_of_an_unknown_request_is_remembered(side: int) -> None:
    world = World(3, FAIR, ranks=1)
    rank = (world.contexts, world.generations)[side][0]
    world.act(rank, "r", "cancel")
    world.start("r", Script(prompt_blocks=2), world.contexts[0], world.generations[0])
    world.clock.run()
    world.check()
    if side == CONTEXT:
        assert {rank.outcomes["r"].outcome for rank in world.ranks} == {Outcome.CANCELLED}


@pytest.mark.parametrize("side", [CONTEXT, GENERATION])
def test_silence_ends_the_session_with_no_other_traffic(side: int) -> None:
    world = World(4, FAIR, ranks=1)
    stopped = (world.contexts, world.generations)[side][0]
    other = (world.generations, world.contexts)[side][0]
    world.start(
        "r",
        Script(prompt_blocks=8, deadline_ms=1_500),
        world.contexts[0],
        world.generations[0],
    )

    def stop(_rank: Rank, session: Session) -> None:
        if session.state is SessionState.SHIPPING:
            stopped.paused_until_ms = 60_000

    world.watch.append(stop)
    world.clock.run()
    assert other.ended_ms["r"] <= 1_500
    assert world.drops, "a peer that does not answer must be dropped"
    world.check()
