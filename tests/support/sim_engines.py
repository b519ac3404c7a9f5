"""Whole workers without processes: real engine, real manager, fake model, virtual time.

A :class:`SimWorld` holds workers and plays the front end of all of them on connection 1. It turns
engines in a random order, moves time only when nobody can go on, and checks after every turn that
each leg ends at most once; ``drain`` checks that everything ended and every page came home.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    recurrent_layer,
)
from tests.support.fake_executor import FakeExecutor, FakeMemory, fake_output
from tests.support.sim_follower import SimFollower
from tests.support.sim_network import SimNetwork, VirtualClock
from tests.support.sim_ranks import DpFakeExecutor, SimRank
from transfer.agent_events import AgentEvent
from transfer.identity import Incarnation, PeerAddress, RankPort
from transfer.wire import pack_ints, unpack_ints
from worker.admission_planner import AdmissionPlanner
from worker.demand import PageDemand
from worker.engine import Engine, EngineLimits, EngineParts
from worker.inbox import Command, FrontEndCommand, InboxItem, RankReported
from worker.interpreter import OnlyThread
from worker.messages import (
    Generate,
    Leg,
    LegEnded,
    LegStarted,
    Prefill,
    PrefixSource,
    SamplingParams,
    StepOutput,
    StopRule,
    WorkerGauges,
)
from worker.ports import Output
from worker.prefixes import PullLimits
from worker.ranks import RankManager
from worker.recording import LeaderManager
from worker.scheduler import Demotion
from worker.token_runs import TokenLogprob

BLOCK = 4
VOCAB = 97
SCOPE = b"scope"


def fake_plan(*windows: int | None, states: int = 0) -> LayoutPlan:
    """A plan with one layer a window; by default one full-attention layer. Then so many recurrent
    layers.
    """
    specs = [
        KVCacheLayerSpec(
            layer_id=index,
            owner=KVCacheLayerOwner.TARGET,
            dtype=ElementType.FLOAT32,
            num_kv_heads=1,
            head_dim=4,
            window=window,
        )
        for index, window in enumerate(windows or (None,))
    ]
    state = BufferSpec(
        role=BufferRole.RECURRENT_STATE,
        dtype=ElementType.FLOAT32,
        num_heads=1,
        elements_per_head=48,
    )
    specs += [
        recurrent_layer(len(specs) + index, KVCacheLayerOwner.TARGET, [state])
        for index in range(states)
    ]
    return LayoutPlan.derive(specs, tokens_per_block=BLOCK)


@dataclass(frozen=True)
class WorkerShape:
    """Size of a simulated worker."""

    slots: int = 64
    host_slots: int = 0
    max_batch_tokens: int = 16
    max_running: int = 8
    max_sequence_tokens: int = 128
    replicas: int = 0
    dp_size: int = 1
    """Ranks with requests of their own, each of this size."""
    planner: AdmissionPlanner | None = None
    depth: int = 1
    quarantine_limit_blocks: int = 1000
    quarantine_grace_ms: int = 1000
    most_served_pulls: int = 4
    demotion: Demotion | None = None
    state_alignment_tokens: int | None = None


@dataclass
class Heard:
    """What the front end got about one leg."""

    started: list[LegStarted] = field(default_factory=list)
    ended: list[LegEnded] = field(default_factory=list)
    ended_ms: int = 0


@dataclass
class Choice:
    """One choice as the front end puts it together from all workers."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    sources: list[str] = field(default_factory=list)


class CountedShares(OnlyThread):
    """Nobody to share with, and every time counts as a wait of no length."""

    def __init__(self) -> None:
        self._shares = 0

    @override
    def share(self) -> None:
        self._shares += 1

    @property
    @override
    def waits(self) -> tuple[int, ...]:
        return (self._shares, *super().waits[1:])


class SimWorker(Output):
    """One worker."""

    def __init__(self, world: SimWorld, name: str, shape: WorkerShape) -> None:
        plan = world.plan
        self.world = world
        self.shape = shape
        self.incarnation = Incarnation.mint(name)
        self.rank = 0
        self.address = PeerAddress(
            incarnation=self.incarnation,
            host="sim",
            control_port=1,
            followers=(RankPort(host="sim", control_port=1),) * (shape.dp_size - 1),
        )
        self.alive = True
        self.paused = False
        """Its engine does not turn; what arrives waits."""
        slots = [shape.slots] * len(plan.pool_groups)
        hosted = [shape.host_slots] * len(plan.pool_groups)

        def manager(memory: PageCopier) -> UnifiedKVCacheManager:
            return UnifiedKVCacheManager(plan, slots, memory, incarnation=name, host_slots=hosted)

        self.memory = FakeMemory(plan, slots, hosted)
        self.manager = manager(self.memory)
        self.replicas = [
            SimFollower(manager(FakeMemory(plan, slots, hosted))) for _ in range(shape.replicas)
        ]
        self.leader = (
            LeaderManager(self.manager, self.replicas)
            if self.replicas
            else RankManager(self.manager)
        )
        self.transfers = world.network.join(self)
        self.ranks = [
            SimRank(self, rank, world.network, manager, FakeMemory(plan, slots, hosted))
            for rank in range(1, shape.dp_size)
        ]
        """Behind this one, which leads."""
        self.executor = FakeExecutor(plan, self.memory, vocab_size=VOCAB, depth=shape.depth)
        others = [FakeExecutor(plan, rank.memory, vocab_size=VOCAB, depth=1) for rank in self.ranks]
        every = DpFakeExecutor([self.executor, *others])
        self.inbox: list[InboxItem] = []
        self.gauges: WorkerGauges | None = None
        self.gauges_seen: list[WorkerGauges] = []
        demand = PageDemand(plan, max_chunk_tokens=shape.max_batch_tokens)
        self.engine = Engine(
            EngineParts(
                incarnation=self.incarnation,
                manager=self.leader,
                transfers=self.transfers,
                executor=every if self.ranks else self.executor,
                output=self,
                clock=world.clock,
                demand=demand,
                others=tuple(rank.parts for rank in self.ranks),
                interpreter=CountedShares(),
            ),
            EngineLimits(
                max_sequence_tokens=min(
                    shape.max_sequence_tokens, demand.longest(self.leader.total_slots())
                ),
                vocab_size=VOCAB,
                max_batch_tokens=shape.max_batch_tokens,
                max_running=shape.max_running,
                quarantine_limit_blocks=shape.quarantine_limit_blocks,
                quarantine_grace_ms=shape.quarantine_grace_ms,
                pulls=PullLimits(least_tokens=BLOCK, most_served=shape.most_served_pulls),
                planner=shape.planner,
                demotion=shape.demotion,
                state_alignment_tokens=shape.state_alignment_tokens,
            ),
        )

    def hear(self, event: AgentEvent) -> None:
        self.inbox.append(event)

    def report(self, item: RankReported) -> None:
        """What another rank says."""
        self.inbox.append(item)

    def turn(self) -> bool:
        """One round of the engine loop; pages of a step that is under way are somebody's."""
        items, self.inbox = self.inbox, []
        progress = self.engine.turn(items)
        for pool_group, slots in self.executor.touched():
            pool = self.manager._store.pools[pool_group]
            assert (pool.holders[slots] + pool.leases[slots] > 0).all(), "given back too early"
        return progress

    @property
    def available(self) -> int:
        """Free and evictable blocks of all ranks."""
        behind = sum(rank.manager.available_blocks() for rank in self.ranks)
        return self.manager.available_blocks() + behind

    @override
    def deliver(self, outputs: Sequence[tuple[int, StepOutput]]) -> None:
        for _, output in outputs:
            self.world.hear(self, output)

    @override
    def broadcast(self, output: StepOutput) -> None:
        assert output.gauges is not None
        self.gauges = output.gauges
        self.gauges_seen.append(output.gauges)


class SimWorld:
    """Workers, their network, one front end."""

    def __init__(self, seed: int = 0, plan: LayoutPlan | None = None) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.plan = plan or fake_plan()
        self.network = SimNetwork(self.plan, self.clock, self.rng)
        self.workers: list[SimWorker] = []
        self.legs: dict[tuple[str, Leg, str], Heard] = {}
        """By worker, leg kind and request id."""
        self.choices: dict[tuple[str, int], Choice] = {}
        self.accepted: set[tuple[str, Leg, str]] = set()
        self.held: dict[str, tuple[SimWorker, Generate, int]] = {}

    def worker(self, name: str, shape: WorkerShape | None = None) -> SimWorker:
        """Start a worker."""
        worker = SimWorker(self, name, shape or WorkerShape())
        self.workers.append(worker)
        return worker

    def send(self, worker: SimWorker, message: Command, connection: int = 1) -> None:
        """A message of the front end; it arrives a little later, in order.

        A leg whose source has several dp groups is sent when it is known which of them it is.
        """
        if isinstance(message, Generate) and message.source and message.source.followers:
            self.held[message.request_id] = (worker, message, connection)
            return
        if isinstance(message, Prefill | Generate):
            kind: Leg = "context" if isinstance(message, Prefill) else "generation"
            self.accepted.add((worker.incarnation.instance, kind, message.request_id))
        worker.inbox.append(FrontEndCommand(connection, message))

    def hear(self, worker: SimWorker, output: StepOutput) -> None:
        """Put what a worker says together."""
        name = worker.incarnation.instance
        for placed in output.placed:
            if placed.request_id in self.held:
                target, message, connection = self.held.pop(placed.request_id)
                source = worker.address.ranks[placed.rank]
                self.send(target, message.model_copy(update={"source": source}), connection)
        for started in output.started:
            self._leg(name, started.leg, started.request_id).started.append(started)
        for run in output.runs:
            choice = self.choices.setdefault((run.request_id, run.choice), Choice())
            for offset, token in enumerate(unpack_ints(run.tokens).tolist()):
                index = run.start + offset
                assert index <= len(choice.tokens), f"{run.request_id}: a token is missing"
                if index < len(choice.tokens):
                    assert choice.tokens[index] == token, f"{run.request_id}: workers disagree"
                    continue
                assert choice.finish is None, f"{run.request_id}: a token after the end"
                choice.tokens.append(token)
                choice.sources.append(name)
                choice.logprobs += run.logprobs[offset : offset + 1]
            if run.finish is not None:
                assert run.start + len(unpack_ints(run.tokens)) == len(choice.tokens)
                choice.finish = run.finish
        for ended in output.ended:
            leg = self._leg(name, ended.leg, ended.request_id)
            leg.ended.append(ended)
            leg.ended_ms = self.clock.now

    def _leg(self, name: str, kind: Leg, request_id: str) -> Heard:
        return self.legs.setdefault((name, kind, request_id), Heard())

    def ended(self, worker: SimWorker, kind: Leg, request_id: str) -> LegEnded:
        """The one terminal event of a leg."""
        heard = self.legs[worker.incarnation.instance, kind, request_id]
        assert len(heard.ended) == 1, heard.ended
        return heard.ended[0]

    def started(self, worker: SimWorker, kind: Leg, request_id: str) -> LegStarted:
        """The one start of a leg."""
        heard = self.legs[worker.incarnation.instance, kind, request_id]
        assert len(heard.started) == 1, heard.started
        return heard.started[0]

    def step(self) -> bool:
        """Turn every engine once and let the network run; False when nothing can happen any more.

        Time passes by itself only while nobody can go on.
        """
        self.network.run_due()
        progress = False
        living = [worker for worker in self.workers if worker.alive and not worker.paused]
        self.rng.shuffle(living)
        for worker in living:
            had_mail = bool(worker.inbox)
            progress |= worker.turn() or had_mail
        if progress:
            self.clock.now += self.rng.randint(0, 4)
            return True
        timers = [worker.engine.next_timer_ms() for worker in living] + [self.network.next_ms()]
        due = [timer for timer in timers if timer is not None]
        if not due:
            return False
        self.clock.now = max(self.clock.now, min(due))
        return True

    def drain(self, limit: int = 200_000) -> None:
        """Run until nothing happens any more, then check that nothing is left over."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("the world does not come to rest")
        self.check_home()

    def run_until(self, condition: object, limit: int = 50_000) -> None:
        """Step until ``condition()`` holds."""
        assert callable(condition)
        for _ in range(limit):
            if condition():
                return
            assert self.step(), "the world came to rest before the condition held"
        raise AssertionError("the condition never held")

    def check_home(self) -> None:
        """Every leg of a living worker ended once, and every page is home."""
        for worker in self.workers:
            if not worker.alive:
                continue
            worker.manager.check()
            for rank in worker.ranks:
                rank.manager.check()
                rank.books.check()
                assert rank.books.available_blocks() == worker.shape.slots
            expected_blocks = worker.shape.slots * worker.shape.dp_size
            assert worker.available == expected_blocks, worker.incarnation
            assert worker.gauges is not None
            assert worker.gauges.running == worker.gauges.waiting == worker.gauges.suspended == 0
            assert worker.gauges.transfers_in_flight == worker.gauges.quarantined_blocks == 0
            assert worker.gauges.free_blocks == worker.gauges.total_blocks
        alive = {worker.incarnation.instance for worker in self.workers if worker.alive}
        for key in self.accepted:
            if key[0] in alive:
                heard = self.legs.get(key, Heard())
                assert len(heard.ended) == 1, (key, heard.ended)


def greedy(seed: int = 0, logprobs: int | None = None) -> SamplingParams:
    """Sampling parameters; the fake model looks at the seed only."""
    return SamplingParams(temperature=0.0, seed=seed, logprobs=logprobs)


def generate(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    source: PeerAddress | None = None,
    emitted: Sequence[Sequence[int]] = (),
    finished: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    logprobs: int | None = None,
    deadline_ms: int = 60_000,
) -> Generate:
    """A generation leg."""
    return Generate(
        request_id=request_id,
        tokens=pack_ints(prompt),
        scope=SCOPE,
        sampling=greedy(len(prompt), logprobs),
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=stop_ids, min_tokens=min_tokens),
        n=n,
        source=source,
        emitted=tuple(pack_ints(part) for part in emitted),
        finished=finished,
        deadline_ms=deadline_ms,
    )


def prefill(
    request_id: str,
    prompt: Sequence[int],
    destination: Incarnation | None,
    *,
    max_tokens: int = 8,
    n: int = 1,
    stop_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    prefix_source: PrefixSource | None = None,
    deadline_ms: int = 60_000,
) -> Prefill:
    """A context leg."""
    return Prefill(
        request_id=request_id,
        tokens=pack_ints(prompt),
        scope=SCOPE,
        sampling=greedy(len(prompt), logprobs),
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=stop_ids),
        n=n,
        destination=destination,
        prefix_source=prefix_source,
        deadline_ms=deadline_ms,
    )


def expected(
    prompt: Sequence[int],
    *,
    choice: int = 0,
    max_tokens: int = 8,
    stop_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What :func:`generate` and :func:`prefill` must give for this prompt."""
    rule = StopRule(max_tokens=max_tokens, stop_token_ids=stop_ids, min_tokens=min_tokens)
    return fake_output(prompt, greedy(len(prompt)), rule, choice, VOCAB)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Tokens."""
    tokens: list[int] = np.asarray([rng.randrange(VOCAB) for _ in range(length)]).tolist()
    return tokens
