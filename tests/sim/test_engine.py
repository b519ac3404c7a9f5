"""Seeded random lives of small clusters: requests, cancellations, stops, deaths and repairs.

Whatever happens, each leg of a living worker ends exactly once, all pages come home, no page is
read under a wrong owner (the fake model raises), workers never disagree about a token, and every
request that was neither cancelled nor out of workers gives exactly the expected tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.support.sim_engines import (
    SimWorker,
    SimWorld,
    WorkerShape,
    expected,
    fake_plan,
    generate,
    prefill,
    random_prompt,
)
from worker.kv_balance import KvBalance
from worker.messages import Cancel, PrefixSource, Stop

SEEDS = 40
BLOCK_OF_SEEDS = 20
REQUESTS = 20
MUST_HAPPEN = {
    *("cached tokens", "preemptions", "pulls succeeded", "pulls declined", "pulls failed"),
    *("deaths", "repairs", "stops", "cancellations", "several", "rows fed on the device"),
}
"""In every block of seeds; longer lives cost more and show no more of it."""
LONGEST = 48


@dataclass
class Asked:
    """One request of the simulated front end."""

    name: str
    prompt: list[int]
    n: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    context: SimWorker | None
    generation: SimWorker
    cancelled: bool = False
    stopped: set[int] = field(default_factory=set)
    repairs: int = 0

    @property
    def open(self) -> bool:
        return not self.cancelled


class Life:
    """One seed's cluster and its front end."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.choice([(None,), (None,), (None, 6), (7, 11, None)])
        self.world = SimWorld(seed, fake_plan(*windows))
        self.world.network.max_delay_ms = rng.choice([0, 5, 50, 300])
        self.contexts = [self.worker(f"c{i}", len(windows)) for i in range(rng.randint(1, 2))]
        self.generations = [self.worker(f"g{i}", len(windows)) for i in range(rng.randint(1, 2))]
        self.common = random_prompt(rng, 20)
        self.lengths = rng.choice([[1, 2, 3, 9], [9, 25]])
        self.hurry = rng.choice([1, 3, 6])
        self.asked: dict[str, Asked] = {}
        self.deaths = rng.choice([0, 1, 1])

    def worker(self, name: str, groups: int) -> SimWorker:
        rng = self.rng
        replicas, dp_size = rng.choice([(0, 1), (0, 1), (1, 1), (0, 2)])
        return self.world.worker(
            name,
            WorkerShape(
                slots=groups * rng.choice([14, 20, 40]),
                max_batch_tokens=rng.choice([5, 16, 64]),
                max_running=rng.choice([4, 8]),
                max_sequence_tokens=LONGEST,
                replicas=replicas,
                dp_size=dp_size,
                planner=rng.choice([None, KvBalance()]),
                depth=1 if dp_size > 1 else rng.choice([1, 2]),
            ),
        )

    def ask(self, name: str) -> None:
        rng = self.rng
        prompt = random_prompt(rng, rng.randint(1, 18))
        if rng.random() < 0.5:
            prompt = self.common[: rng.randint(1, 20)] + prompt
        max_tokens = min(rng.choice(self.lengths), LONGEST - len(prompt))
        likely = expected(prompt, max_tokens=max_tokens)
        stop_ids = (rng.choice(likely),) if rng.random() < 0.3 else ()
        generation = rng.choice([one for one in self.generations if one.alive])
        contexts = [one for one in self.contexts if one.alive]
        context = rng.choice(contexts) if contexts and rng.random() < 0.8 else None
        one = Asked(name, prompt, rng.choice([1, 1, 3]), max_tokens, stop_ids, context, generation)
        self.asked[name] = one
        if context is not None:
            message = prefill(
                name,
                prompt,
                generation.incarnation,
                n=one.n,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                prefix_source=self.prefix_source(context),
                deadline_ms=10**7,
            )
            self.world.send(context, message)
        source = None if context is None else context.address
        self.generate(one, generation, source=source)

    def prefix_source(self, context: SimWorker) -> PrefixSource | None:
        """Some other worker, alive or not, whatever it holds."""
        others = [one for one in self.contexts + self.generations if one is not context]
        if not others or self.rng.random() < 0.4:
            return None
        peer = self.rng.choice(self.rng.choice(others).address.ranks)
        return PrefixSource(peer=peer, tokens=LONGEST)

    def generate(self, one: Asked, worker: SimWorker, **more: object) -> None:
        message = generate(
            one.name,
            one.prompt,
            n=one.n,
            max_tokens=one.max_tokens,
            stop_ids=one.stop_ids,
            deadline_ms=10**7,
            **more,  # type: ignore[arg-type]
        )
        self.world.send(worker, message)

    def cancel(self, one: Asked) -> None:
        one.cancelled = True
        self.world.held.pop(one.name, None)
        for worker in (one.context, one.generation):
            if worker is not None:
                self.world.send(worker, Cancel(request_id=one.name))

    def stop(self, one: Asked) -> None:
        choice = self.rng.randrange(one.n)
        heard = self.world.choices.get((one.name, choice))
        if heard is None or not heard.tokens:
            return
        one.stopped.add(choice)
        index = self.rng.randrange(len(heard.tokens))
        message = Stop(request_id=one.name, choice=choice, index=index)
        self.world.send(one.generation, message)

    def kill(self) -> None:
        groups = (self.contexts, self.generations)
        alive = [one for group in groups for one in group if one.alive]
        spare = [one for one in alive if one in self.contexts]
        spare += self.generations[:1] if sum(g.alive for g in self.generations) > 1 else []
        spare = [one for one in spare if one.alive]
        if spare:
            self.world.network.kill(self.rng.choice(spare))
            self.deaths -= 1

    def act(self) -> None:
        """One random deed of the outside world."""
        some = [one for one in self.asked.values() if one.open]
        chance = self.rng.random()
        if chance < 0.6 and len(self.asked) < REQUESTS:
            self.ask(f"r{len(self.asked)}")
        elif chance < 0.75 and some:
            self.cancel(self.rng.choice(some))
        elif chance < 0.85 and some:
            self.stop(self.rng.choice(some))
        elif chance < 0.9 and self.deaths:
            self.kill()

    def repair(self) -> bool:
        """What a front end does: unfinished choices go on at a worker that lives."""
        sent = False
        for one in self.asked.values():
            if not one.open or not self.lost(one):
                continue
            heard = [self.world.choices.get((one.name, k)) for k in range(one.n)]
            finished = tuple(
                k
                for k, choice in enumerate(heard)
                if k in one.stopped or (choice is not None and choice.finish)
            )
            if len(finished) == one.n:
                one.cancelled = True
                continue
            emitted = [[] if choice is None else choice.tokens for choice in heard]
            target = self.rng.choice([one for one in self.generations if one.alive])
            name = target.incarnation.instance
            self.world.legs.pop((name, "generation", one.name), None)
            one.generation, one.repairs = target, one.repairs + 1
            assert one.repairs < 4, one
            self.generate(one, target, emitted=emitted, finished=finished)
            sent = True
        return sent

    def lost(self, one: Asked) -> bool:
        """Whether nobody works on a request that is not finished."""
        if not one.generation.alive:
            return True
        if one.context is not None and not one.context.alive and one.name in self.world.held:
            del self.world.held[one.name]  # nobody will say where its source is
            return True
        name = one.generation.incarnation.instance
        heard = self.world.legs.get((name, "generation", one.name))
        return bool(heard and heard.ended and heard.ended[-1].outcome == "failed")

    def live(self) -> None:
        while len(self.asked) < REQUESTS:
            for _ in range(self.rng.randint(0, self.hurry)):
                self.world.step()
            self.act()
            if self.rng.random() < 0.2:
                self.repair()
        self.world.drain()
        while self.repair():
            self.world.drain()

    def judge(self) -> None:
        for one in self.asked.values():
            for choice in range(one.n):
                right = expected(
                    one.prompt,
                    choice=choice,
                    max_tokens=one.max_tokens,
                    stop_ids=one.stop_ids,
                )
                heard = self.world.choices.get((one.name, choice))
                tokens = [] if heard is None else heard.tokens
                assert tokens == right[: len(tokens)], one
                if one.open and choice not in one.stopped:
                    assert tokens == right, one
                    assert heard is not None
                    assert heard.finish is not None

    def tally(self) -> Counter[str]:
        """What has happened in it."""
        seen = Counter(
            several=sum(bool(one.address.followers) for one in self.contexts + self.generations),
            deaths=sum(not one.alive for one in self.contexts + self.generations),
            repairs=sum(one.repairs for one in self.asked.values()),
            stops=sum(len(one.stopped) for one in self.asked.values()),
            cancellations=sum(one.cancelled for one in self.asked.values()),
        )
        for worker in self.contexts + self.generations:
            gauges = worker.gauges
            if gauges is not None:
                seen["cached tokens"] += gauges.cached_tokens_total
                seen["preemptions"] += gauges.preemptions_total
                seen["pulls succeeded"] += gauges.pulls_succeeded_total
                seen["pulls declined"] += gauges.pulls_declined_total
                seen["pulls failed"] += gauges.pulls_failed_total
                seen["rows fed on the device"] += worker.executor.fed_rows
        return seen


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK_OF_SEEDS))
def test_random_lives_keep_every_promise(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + BLOCK_OF_SEEDS):
        life = Life(seed)
        try:
            life.live()
            life.judge()
        except Exception as error:
            error.add_note(f"in life {seed}")
            raise
        seen += life.tally()
    assert set(+seen) >= MUST_HAPPEN, seen
