"""Random worlds of many requests with everything mixed, and the two plain ones: nothing goes wrong,
and a peer that falls silent.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.transfer_agent import Handled, Stray
from tests.sim.transfer_engine import Script
from tests.sim.transfer_network import Weather
from tests.sim.transfer_process import CONTEXT, GENERATION
from tests.sim.transfer_terrain import BLOCK, MIXED, TERRAINS, WHOLE, Terrain
from tests.sim.transfer_trials import (
    REPLAY,
    TrialFailed,
    random_world,
    run_random,
    tally,
    trial,
)
from tests.sim.transfer_world import World
from transfer.outcome import Outcome
from transfer.session import SessionState

SEEDS = 300
BLOCK_OF_SEEDS = 50
MUST_HAPPEN = {
    *("succeeded", "failed", "cancelled", "pages written", "staged", "evicted", "matched"),
    *("kill", "restart", "cut", "hold", "pause", "lost", "dropped", "quarantined"),
    *("copies", "held up", "vanished", "pulled", "declined", "sources differ"),
}
SMALL = Script(tuple(range(BLOCK)), chunk_ms=(0, 0), deeds=((GENERATION, 100, "cancel"),))
LEAST_MOMENTS = 34
"""Different moments of cancellation, of the 60 that the cells name, in every block of seeds."""


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK_OF_SEEDS))
def test_random_worlds(first: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(first, first + BLOCK_OF_SEEDS):
        seen += tally(run_random(number))
    assert set(seen) >= MUST_HAPPEN
    moments = {name for name in seen if name.startswith(("asked-", "told-"))}
    assert len(moments) >= LEAST_MOMENTS, sorted(moments)


def test_a_world_is_the_same_each_time() -> None:
    stories = []
    for _ in range(2):
        stories.append(run_random(7).story())
    assert stories[0] == stories[1]
    assert len(stories[0].splitlines()) > 50


def test_a_failing_world_tells_its_number_and_story() -> None:
    world = random_world(7)

    def spoil(seen: Handled | Stray) -> None:
        if isinstance(seen, Handled) and seen.session.state is SessionState.RECEIVING:
            world.generations[0].ranks[0].memory.lend("nobody", [(0, 0), (0, 1), (0, 2)])
            world.generations[1].ranks[0].memory.lend("nobody", [(0, 0), (0, 1), (0, 2)])

    world.watches.append(spoil)
    with pytest.raises(TrialFailed) as caught, trial(world, "world 7", f"{REPLAY} 7"):
        world.finish()
    told = str(caught.value)
    assert "world 7 on mixed terrain: AssertionError" in told
    assert "run it again: python -m tests.sim.transfer_trials 7\n" in told
    assert "ANNOUNCED PagesReady -> RECEIVING" in told


@pytest.mark.parametrize("terrain", TERRAINS, ids=lambda terrain: terrain.name)
def test_without_faults_every_request_is_received(terrain: Terrain) -> None:
    world = World(1, terrain, Weather(copy_chance=0.5), instances=2, slots=16)
    with trial(world, "no faults", ""):
        for number in range(20):
            tokens = 1 + 7 * number % (8 * BLOCK)
            script = Script(prompt=tuple(range(number % 3 * 100, number % 3 * 100 + tokens)))
            world.start(f"r{number}", script, world.contexts[number % 2], world.generations[0])
        world.finish()
    ends = [
        end for rank in world.ranks for heard in rank.engine.heard.values() for end in heard.ends
    ]
    assert len(ends) == 40
    assert {end.outcome for end in ends} == {Outcome.SUCCEEDED}
    handoffs = [heard.handoffs for heard in world.generations[0].ranks[0].engine.heard.values()]
    assert handoffs == [1] * 20
    assert (tally(world)["staged"] > 0) == terrain.stages
    assert not tally(world)["quarantined"]


def test_what_waits_behind_others_is_not_taken_for_stuck() -> None:
    """Twenty-five messages are ahead of the small request, two at a time, 60 ms and more each."""
    weather = Weather(delay_ms=(1, 1), move_ms=(60, 60), finish_ms=(0, 0))
    world = World(6, MIXED, weather, slots=64)
    large = [f"large {number}" for number in range(5)]
    with trial(world, "small behind large", ""):
        for start, name in enumerate(large):
            prompt = tuple(range(1_000 * start, 1_000 * start + 9 * BLOCK))
            world.start(name, Script(prompt, 9, chunk_ms=(0, 0)), *world.instances)
        world.clock.after(50, lambda: world.start("small", SMALL, *world.instances))
        world.finish()
    for rank in world.ranks:
        assert [world.ends(rank, name)[0].outcome for name in large] == [Outcome.SUCCEEDED] * 5
        assert world.ends(rank, "small")[0].outcome is Outcome.CANCELLED
        assert not rank.agent.drops


@pytest.mark.parametrize("side", [CONTEXT, GENERATION])
def test_silence_ends_the_session_with_no_other_traffic(side: int) -> None:
    """No heartbeat tells: the deadlines of the session alone end it and drop the peer."""
    world = World(4, WHOLE, Weather())
    stopped, other = world.ranks[side], world.ranks[1 - side]

    def stop(seen: Handled | Stray) -> None:
        if isinstance(seen, Handled) and seen.session.state is SessionState.SHIPPING:
            world.silence(stopped, 60_000)

    world.watches.append(stop)
    with trial(world, "silence", ""):
        script = Script(prompt=tuple(range(8 * BLOCK)), deadline_ms=1_500)
        world.start("r", script, *world.instances)
        world.finish()
    heard = other.engine.heard["r"]
    assert [end.outcome for end in heard.ends] == [Outcome.FAILED]
    assert heard.ended_ms[0] <= 1_500 + max(world.weather.delay_ms)
    assert other.agent.drops, "a peer that does not answer must be dropped"
