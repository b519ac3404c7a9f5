"""Random worlds by number: many requests between two context and two generation instances, and
everything that may go wrong, at random times.

``python -m tests.sim.transfer_trials 17`` runs number 17 again and prints its story.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from tests.sim.transfer_agent import Handled, Stray
from tests.sim.transfer_cells import Moment, Opening, Way
from tests.sim.transfer_engine import Script
from tests.sim.transfer_network import Weather
from tests.sim.transfer_process import CONTEXT, GENERATION
from tests.sim.transfer_terrain import BLOCK, RANKED, TERRAINS
from tests.sim.transfer_world import World
from transfer import staging_buffers
from transfer.messages import CancelSession
from transfer.outcome import Outcome
from transfer.pull_session import PullSession
from transfer.session import SessionState
from transfer.session_events import CancelRequested
from transfer.source_session import SourceSession

REPLAY = "python -m tests.sim.transfer_trials"
WAYS = {CancelRequested: Way.ASKED, CancelSession: Way.TOLD}
EVERYWHERE = (*TERRAINS, *RANKED)
FAMILIES, KNOWN = 3, 0
"""Prompts that begin alike, so that prefixes are found in the caches of both sides. Of one kind
contexts hold some before: that is what is pulled.
"""


class TrialFailed(AssertionError):
    """What was wrong in which world, how to run it again, and all that happened in it."""


@contextmanager
def trial(world: World, name: str, replay: str) -> Iterator[None]:
    """Run within: few staging buffers, and a failure tells the story of ``world``."""
    with patch.object(staging_buffers, "STAGING_BUFFERS", 2):
        try:
            yield
        except Exception as error:
            raise TrialFailed(
                f"{name} on {world.terrain.name} terrain: {error!r}\n"
                f"run it again: {replay}\n{world.story()}"
            ) from error


def random_script(rng: random.Random) -> Script:
    """A prompt of one of the families and all that its engines do with it."""
    pulls = rng.random() < 0.35
    family, tokens = rng.randrange(FAMILIES), rng.randint(1, 9 * BLOCK)
    own = rng.randint(0, tokens)
    if pulls:
        family, tokens = KNOWN, max(tokens, 3 * BLOCK)
        own = tokens
    prompt = [*_of_family(family, own)]
    prompt += [rng.randrange(10_000, 20_000) for _ in range(tokens - own)]
    deeds = []
    for side in (CONTEXT, GENERATION):
        if rng.random() < 0.25:
            at_ms = rng.randint(0, rng.choice((250, 250, 1_500)))
            deeds.append((side, at_ms, rng.choice(("cancel", "cancel", "fail"))))
    step_ms = rng.choice((0, 5, 30, 80))
    return Script(
        prompt=tuple(prompt),
        chunk_blocks=rng.randint(1, 4),
        prefill_ms=(0, rng.choice((1, 60))),
        chunk_ms=(step_ms, step_ms),
        allocate_ms=(0, rng.choice((1, 60))),
        decode_ms=(0, rng.choice((10, 300))),
        deadline_ms=rng.choice((60, 200, 5_000, 5_000, 20_000)),
        no_decode=rng.random() < 0.15,
        least_blocks=rng.randint(1, 3) if pulls else None,
        deeds=tuple(deeds),
    )


def _of_family(family: int, tokens: int) -> tuple[int, ...]:
    """How prompts of a family begin."""
    return tuple(range(family * 1_000, family * 1_000 + tokens))


def random_world(number: int) -> World:
    """World ``number``, ready to run."""
    rng = random.Random(f"world {number}")
    weather = Weather(
        delay_ms=(0, rng.choice((1, 20, 120))),
        copy_chance=rng.choice((0.0, 0.3)),
        move_ms=(0, rng.choice((5, 60, 400))),
        finish_ms=(0, rng.choice((1, 10, 150))),
        notice_ms=(0, rng.choice((5, 60, 600))),
        endings_ms=(0, rng.choice((1, 30, 1_000))),
        teardown_ms=(0, rng.choice((1, 30, 1_000))),
        remote_access=rng.random() < 0.6,
    )
    world = World(
        number,
        EVERYWHERE[number % len(EVERYWHERE)],
        weather,
        instances=2,
        slots=rng.choice((12, 16, 24)),
        deaths_are_known=rng.random() < 0.7,
        hears_ms=(0, rng.choice((0, 5, 40))),
    )
    world.watches.append(partial(_count_moment, world.faults))
    for context in world.contexts:
        known = rng.randint(0, 9) * BLOCK
        for rank in context.ranks:
            # Ranks of an instance hold the same, unless one has evicted it.
            if known and rng.random() < 0.9:
                rank.engine.remember(_of_family(KNOWN, known))
    for index in range(rng.randint(3, 10)):
        script = random_script(rng)
        places = rng.randrange(2), rng.randrange(2)
        world.clock.after(rng.randint(0, 800), partial(_start, world, f"r{index}", script, places))
    for _ in range(rng.randint(0, 4)):
        world.clock.after(
            rng.randint(0, 1_200),
            partial(
                _strike, world, rng.choice(("kill", "cut", "hold", "pause")), rng.randrange(12)
            ),
        )
    return world


def _count_moment(seen_before: Counter[str], seen: Handled | Stray) -> None:
    """Count a cancellation by the moment at which it came."""
    side, state = seen.process.side, SessionState.CLOSED
    if isinstance(seen, Stray):
        way = Way.TOLD if isinstance(seen.message, CancelSession) else None
    else:
        way = WAYS.get(type(seen.event))
        state = seen.before
    if way is not None:
        pulls = isinstance(seen, Handled) and isinstance(seen.session, PullSession | SourceSession)
        opening = Opening.PULL if pulls else Opening.GRANT
        seen_before[Moment(side, way, state, opening).name] += 1


def _start(world: World, request_id: str, script: Script, places: tuple[int, int]) -> None:
    context, generation = world.contexts[places[0]], world.generations[places[1]]
    world.start(request_id, script, context, generation)


def _strike(world: World, fault: str, place: int) -> None:
    rank = world.ranks[place % len(world.ranks)]
    match fault:
        case "kill":
            world.kill(rank)
            if world.rng.random() < 0.5:
                dead = world.instance_of(rank)
                world.clock.after(world.rng.randint(0, 300), partial(world.restart, dead))
        case "cut":
            world.cut(rank)
        case "hold":
            world.hold(rank, world.rng.choice((50, 300, 1_500)))
        case _:
            world.pause(rank, world.rng.choice((50, 300, 900, 2_500)))


def run_random(number: int) -> World:
    """Run world ``number`` to its end. Raises TrialFailed."""
    world = random_world(number)
    with trial(world, f"world {number}", f"{REPLAY} {number}"):
        world.finish()
    return world


def tally(world: World) -> Counter[str]:
    """What has happened in a world, for tests that ask whether anything did."""
    seen = Counter(world.faults)
    dead = [rank for instance in world.buried for rank in instance.ranks]
    for rank in [*world.ranks, *dead]:
        engine = rank.engine
        ends = [end for heard in engine.heard.values() for end in heard.ends]
        seen.update(f"{end.outcome.value}" for end in ends if end.outcome is not Outcome.PENDING)
        seen["declined"] += sum(end.reason.startswith("declined") for end in ends)
        seen["pulled"] += engine.pulled
        seen["sources differ"] += sum("ranks of the source" in end.reason for end in ends)
        seen["pages written"] += rank.memory.writes
        seen["staged"] += rank.memory.staged
        seen["quarantined"] += engine.quarantines
        seen["evicted"] += engine.manager.counters.pages_evicted
        seen["matched"] += engine.manager.counters.matched_tokens
        seen["dropped"] += len(rank.agent.drops)
    for link in world.links:
        seen["copies"] += link.copies
        seen["held up"] += link.held_up
        seen["vanished"] += link.vanished
    return seen


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        done = run_random(int(argument))
        print(done.story(), *sorted(tally(done).items()), sep="\n")
