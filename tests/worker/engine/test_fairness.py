"""How long anybody waits under the scheduler's rules: deterministic simulations of the pure plans,
with the bounds that the rules promise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from worker.scheduler import Demotion, Item, Limits, Phase, Row, plan_admission, plan_step


@dataclass
class Prefills:
    """Prompts that are prefilled step by step; ``done`` holds the step of each one's last chunk."""

    limits: Limits
    left: dict[int, int] = field(default_factory=dict)
    demoted: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def add(self, key: int, tokens: int) -> None:
        """A prompt arrives; keys are in order of arrival."""
        self.left[key] = tokens
        self.demoted[key] = 0

    def step(self) -> None:
        """One step."""
        self.steps += 1
        rows = [Row(key, (key, 0), left, 0, self.demoted[key]) for key, left in self.left.items()]
        plan = plan_step(rows, self.limits)
        for key in plan.demoted:
            self.demoted[key] += 1
        for chunk in plan.chunks:
            self.left[chunk.key] -= chunk.tokens
            if not self.left[chunk.key]:
                del self.left[chunk.key]
                self.done[chunk.key] = self.steps


def prefills(budget: int, demotion: Demotion | None = None) -> Prefills:
    return Prefills(Limits(budget, max_running=64, total=(1,), demotion=demotion))


def test_a_short_prompt_behind_a_long_one_has_its_token_in_the_next_step() -> None:
    world = prefills(512)
    world.add(1, 32_768)
    world.step()
    world.add(2, 200)
    world.step()
    assert world.done == {2: 2}


def test_a_hundred_short_prompts_wait_for_each_other_and_not_for_the_long_one() -> None:
    world = prefills(512)
    world.add(0, 32_768)
    for key in range(1, 33):
        world.add(key, 128)
    while len(world.done) < 32:
        world.step()
    assert world.steps == 32 * 128 // 256
    while world.left:
        world.step()
    assert world.steps == (32_768 + 32 * 128) // 512  # nothing of the budget was left unused


def test_a_long_prompt_takes_at_most_twice_its_own_steps_under_a_stream_of_short_ones() -> None:
    world = prefills(1024)
    world.add(0, 10_000)
    key = 0
    while 0 not in world.done:
        for _ in range(3):
            key += 1
            world.add(key, 400)
        world.step()
    assert world.done[0] <= 2 * -(-10_000 // 1024)


def test_a_demoted_prompt_ages_under_a_stream_of_short_ones() -> None:
    """The case of B35: 10,000 tokens left, a budget of 1,024, two steps of demotion."""
    world = prefills(1024, Demotion(uncached_tokens=512, max_iters=2))
    world.add(0, 10_000)
    key = 0
    while 0 not in world.done:
        for _ in range(4):
            key += 1
            world.add(key, 256)
        world.step()
    assert world.demoted[0] == 2
    assert world.done[0] <= 2 + 2 * -(-10_000 // 1024)


@given(
    st.lists(st.tuples(st.integers(2, 400), st.integers(0, 3)), min_size=1, max_size=25),
    st.integers(2, 64),
    st.sampled_from([None, Demotion(100, 3)]),
)
@example([(4, 0), (2, 0), (2, 0)], 3, None)
def test_every_prompt_ends_within_its_bounds(
    arrivals: list[tuple[int, int]], budget: int, demotion: Demotion | None
) -> None:
    world = prefills(budget, demotion)
    came: dict[int, int] = {}
    for key, (tokens, pause) in enumerate(arrivals):
        came[key] = world.steps
        world.add(key, tokens)
        for _ in range(pause):
            if world.left:
                world.step()
    while world.left:
        world.step()
    ageing = 0 if demotion is None else demotion.max_iters
    # Oldest first: everything that came before it, then itself, each at half speed at worst. Last
    # tokens that are alone in their step go first, as decodes do: one of each other prompt.
    before = -(-(len(arrivals) - 1) // (budget - budget // 2))
    for key, (tokens, _) in enumerate(arrivals):
        before += -(-tokens // (budget - budget // 2)) + ageing
        assert world.done[key] <= came[key] + before
    # Nearest first: what others have left once they are as near as it, at half of the speed.
    for key, (tokens, _) in enumerate(arrivals):
        work = sum(min(other, tokens) for other, _ in arrivals)
        assert world.done[key] <= came[key] + -(-work // (budget // 2))


def test_a_large_item_is_passed_and_not_starved() -> None:
    """A pool of 100 slots; small items of 5 come two a round and stay 9 rounds; one wants 60."""
    total, stay = 100, 9
    limits = Limits(max_batch_tokens=1, max_running=1000, total=(total,))
    waiting = {0: Item(0, Phase.QUEUED, (0, 0), (60,))}
    ends: dict[int, list[int]] = {round_: [9] for round_ in range(1, 6)}  # 45 slots were taken
    free, key, large_at, passed = total - 45, 0, None, 0
    waits: list[int] = []
    arrived: dict[int, int] = {0: 0}
    for now in range(60):
        free += sum(ends.pop(now, []))
        for _ in range(2):
            key += 1
            waiting[key] = Item(key, Phase.QUEUED, (key, 0), (5,))
            arrived[key] = now
        plan = plan_admission(list(waiting.values()), (free,), limits)
        for one, slots in plan.passed:
            item = waiting[one]
            waiting[one] = Item(one, item.phase, item.arrival, item.demand, 1, item.passed + slots)
            passed += slots if one == 0 else 0
        for one in plan.admit:
            demand = waiting.pop(one).demand[0]
            free -= demand
            ends.setdefault(now + stay, []).append(demand)
            if one == 0:
                large_at = now
            else:
                waits.append(now - arrived[one])
        assert free >= 0
    assert passed <= 60
    assert large_at is not None
    assert large_at <= 12 + stay  # twelve small ones pass, six rounds of two; then they run out
    assert waits[:10] == [0] * 10  # who fits beside the rest is not held up by the large one
