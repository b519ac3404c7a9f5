"""Requests with two ranks on one side, of which one fails: each case by name.

Whatever befalls one, the others end as well, each once, and all pages come home; ``World.finish``
says what else must hold. Each run proves that the rank was in its state when the fault came.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pytest

from tests.sim.transfer_agent import Handled, Stray
from tests.sim.transfer_engine import Script
from tests.sim.transfer_network import Weather
from tests.sim.transfer_process import CONTEXT, GENERATION
from tests.sim.transfer_terrain import BLOCK, FAN_IN, FAN_OUT, RANKED, TERRAINS, Terrain
from tests.sim.transfer_trials import tally, trial
from tests.sim.transfer_world import Rank, World
from transfer.outcome import Outcome
from transfer.session import SessionState

S = SessionState
GRANT: Final = Script(prompt=tuple(range(8 * BLOCK - 3)), prefill_ms=(30, 30), allocate_ms=(30, 30))
PULL: Final = replace(GRANT, least_blocks=2, chunk_ms=(100, 100))
WEATHER: Final = Weather(delay_ms=(2, 4), move_ms=(20, 35), notice_ms=(5, 40))
LATE: Final = (S.HANDED_OFF, S.COMPLETING)
"""Who is beside a rank in one of these may have received all."""
SUCCEEDED, FAILED, CANCELLED = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED


@dataclass(frozen=True)
class Case:
    """What befalls rank ``rank`` of ``side`` when its session comes to ``state``: "kill", "cut",
    "cancel" or "fail". The other side ends with ``outcome``, those beside it badly as well.
    """

    terrain: Terrain
    side: int
    rank: int
    state: SessionState
    deed: str
    outcome: Outcome
    script: Script = GRANT

    @property
    def name(self) -> str:
        """For test ids."""
        what = "grant" if self.script.least_blocks is None else "pull"
        side = ("sender", "receiver")[self.side]
        return f"{what}-{side}-{self.rank}-{self.state.value}-{self.deed}".replace(" ", "-")


CASES: Final = tuple(
    Case(*case)
    for case in (
        # One of two senders. Its instance dies with it, so the other is not looked at.
        (FAN_IN, CONTEXT, 0, S.SHIPPING, "kill", FAILED),
        (FAN_IN, CONTEXT, 1, S.SHIPPING, "kill", FAILED),
        (FAN_IN, CONTEXT, 1, S.HANDED_OFF, "kill", FAILED),
        (FAN_IN, CONTEXT, 1, S.GRANTED, "kill", FAILED),
        (FAN_IN, CONTEXT, 1, S.SHIPPING, "cut", FAILED),
        (FAN_IN, CONTEXT, 0, S.ANNOUNCED, "cancel", CANCELLED),
        (FAN_IN, CONTEXT, 1, S.SHIPPING, "cancel", CANCELLED),
        (FAN_IN, CONTEXT, 1, S.HANDED_OFF, "fail", FAILED),
        (FAN_IN, CONTEXT, 1, S.ASKED, "kill", FAILED, PULL),
        (FAN_IN, CONTEXT, 1, S.SHIPPING, "cancel", CANCELLED, PULL),
        # One of two receivers.
        (FAN_OUT, GENERATION, 0, S.RECEIVING, "cancel", CANCELLED),
        (FAN_OUT, GENERATION, 1, S.RECEIVING, "cancel", CANCELLED),
        (FAN_OUT, GENERATION, 1, S.GRANTED, "cancel", CANCELLED),
        (FAN_OUT, GENERATION, 1, S.ANNOUNCED, "fail", CANCELLED),
        (FAN_OUT, GENERATION, 1, S.RECEIVING, "kill", FAILED),
        (FAN_OUT, GENERATION, 1, S.COMPLETING, "cut", FAILED),
        (FAN_OUT, GENERATION, 1, S.ASKED, "cancel", CANCELLED, PULL),
        (FAN_OUT, GENERATION, 1, S.RECEIVING, "kill", FAILED, PULL),
    )
)


def world_of(terrain: Terrain, script: Script, seed: int) -> World:
    """Two instances; sources have what is pulled."""
    world = World(seed, terrain, WEATHER)
    if script.least_blocks is not None:
        for rank in world.contexts[0].ranks:
            rank.engine.remember(script.whole_blocks)
    return world


def outcomes(world: World, rank: Rank) -> list[Outcome]:
    """How the request ended at a rank."""
    return [end.outcome for end in world.ends(rank, "r")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_rank_of_two(case: Case) -> None:
    world = world_of(case.terrain, case.script, CASES.index(case))
    victim = world.instances[case.side].ranks[case.rank]
    done: list[SessionState] = []

    def befall(seen: Handled) -> None:
        if done:
            return
        done.append(seen.session.state)
        match case.deed:
            case "kill":
                world.kill(victim)
            case "cut":
                world.cut(victim)
            case _:
                world.act(victim, "r", case.deed)

    def watch(seen: Handled | Stray) -> None:
        if not isinstance(seen, Handled) or seen.process is not victim.process:
            return
        if seen.session.state is case.state and not done:
            world.clock.after(0, partial(befall, seen))

    world.watches.append(watch)
    with trial(world, case.name, ""):
        world.start("r", case.script, *world.instances)
        world.clock.run()
        assert done, "the state was never reached"
        assert set(done) == {case.state}
        for rank in world.instances[1 - case.side].ranks:
            assert outcomes(world, rank) == [case.outcome]
        for rank in world.instances[case.side].ranks:
            if rank.process.alive:
                (outcome,) = outcomes(world, rank)
                assert outcome is not SUCCEEDED or case.state in LATE
        world.finish()


@pytest.mark.parametrize("script", [GRANT, PULL], ids=["grant", "pull"])
@pytest.mark.parametrize("terrain", RANKED, ids=lambda terrain: terrain.name)
def test_both_ranks_move_their_part(terrain: Terrain, script: Script) -> None:
    world = world_of(terrain, script, 1)
    world.start("r", script, *world.instances)
    with trial(world, "no faults", ""):
        world.finish()
    assert [outcomes(world, rank) for rank in world.ranks] == [[SUCCEEDED]] * 3
    assert all(rank.memory.writes for rank in world.generations[0].ranks)
    assert tally(world)["pulled"] == (script is PULL) * len(terrain.generations)


@pytest.mark.parametrize("terrain", [*TERRAINS, *RANKED], ids=lambda terrain: terrain.name)
def test_a_pull_of_what_is_not_there_is_over_and_no_failure(terrain: Terrain) -> None:
    world = World(1, terrain, WEATHER)
    world.start("r", PULL, *world.instances)
    with trial(world, "declined", ""):
        world.finish()
    for rank in world.ranks:
        (end,) = world.ends(rank, "r")
        assert end.outcome is SUCCEEDED
        assert end.reason == "declined: 0 blocks are here"


def test_sources_that_found_different_prefixes_fail_the_pull() -> None:
    """The puller ends at once: it has no use for one layer group of a block."""
    world = World(1, FAN_IN, WEATHER)
    for rank, blocks in zip(world.contexts[0].ranks, (3, 5), strict=True):
        rank.engine.remember(PULL.prompt[: blocks * BLOCK])
    world.start("r", PULL, *world.instances)
    with trial(world, "sources differ", ""):
        world.finish()
    (end,) = world.ends(world.generations[0].ranks[0], "r")
    assert end.outcome is FAILED
    assert end.reason == "ranks of the source found [3, 5] blocks of a prefix"
    assert not world.generations[0].ranks[0].memory.writes


def test_a_receiver_that_never_grants_ends_the_request_of_the_other() -> None:
    """It was cancelled at one of two before: the sender never hears of it from that one."""
    world = World(1, FAN_OUT, WEATHER)
    first, second = world.generations[0].ranks
    world.act(second, "r", "cancel")
    world.start("r", replace(GRANT, deadline_ms=400), *world.instances)
    with trial(world, "never grants", ""):
        world.finish()
    assert outcomes(world, second) == [CANCELLED]
    assert outcomes(world, first) == [FAILED]
    assert outcomes(world, world.contexts[0].ranks[0]) != [SUCCEEDED]
