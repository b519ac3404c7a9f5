"""Model, pages and engine of one rank, put together: everything that the engine thread will own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from kvcache_core.ports import PageCopier
from kvcache_core.sizing import SizingDemand
from kvcache_core.storage import TorchStorage
from worker.admission_planner import AdmissionPlanner
from worker.cache_size import Candidate, limit_torch, size_cache
from worker.config import WorkerConfig
from worker.demand import PageDemand
from worker.device_memory import DeviceMemory, device_memory
from worker.dp_executor import DpExecutor
from worker.dp_group import GroupParts
from worker.elsewhere import ElsewhereCopied
from worker.engine import Engine, EngineLimits, EngineParts
from worker.executor import ModelExecutor, RankExecutor
from worker.facts import kv_dtypes
from worker.group_leading import GroupTransfers
from worker.hook_declarations import declared_hooks
from worker.interpreter import SharedInterpreter
from worker.leading import LeaderTransfers
from worker.messages import SamplingParams
from worker.model.assembly import BucketedSteps, PlainSteps, StepLimits, no_capture
from worker.model.dp_ranks import DpRanks
from worker.model.dp_runner import DpRunner
from worker.model.loader import LoadedModel, load_model
from worker.model.rank_sum import OnlyRank as WholeModel
from worker.model.rank_sum import RankSum
from worker.ports import Agreement, CacheManager, Clock, Draw, OnlyRank, Output, Slice, Transfers
from worker.prefixes import PullLimits
from worker.rank_meeting import RankMeeting
from worker.ranks import RankManager
from worker.recording import Follower, LeaderManager
from worker.runtime_hooks import RuntimeHooks, manager_class, planner_of, refuse_idle
from worker.scheduler import Demotion
from worker.step_ways import StepMeans, step_ways

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


class MonotonicClock(Clock):
    """The process's monotonic clock."""

    @override
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, eq=False, slots=True)
class RankCore:
    """What is there once the model is loaded, before anybody can connect."""

    loaded: LoadedModel
    hooks: RuntimeHooks
    planner: AdmissionPlanner | None
    plan: LayoutPlan
    storage: TorchStorage
    pages: UnifiedKVCacheManager
    pages_over: Callable[[PageCopier], UnifiedKVCacheManager]
    """Makes a manager like this rank's: that of any other rank, as all have the same slots."""
    executor: RankExecutor
    demand: PageDemand
    max_sequence_tokens: int


def load_core(
    config: WorkerConfig,
    meeting: RankMeeting | None,
    progress: Callable[[str], None],
    memory_of: Callable[[torch.device], DeviceMemory | None] = device_memory,
) -> RankCore:
    """Load the model, or this rank's part of it where there is somebody to meet, and allocate its
    pages, as many as ``memory_of`` its device says there is room for unless their bytes are
    configured. Raises ModelLoadError, or ValueError for pages that do not fit and for runtime hooks
    that cannot be used.
    """
    declarations = declared_hooks(config.runtime_hooks)
    ranks: RankSum = WholeModel()
    if meeting is not None:
        progress("meeting the other ranks")
        ranks = meeting.join(torch.device(config.device), config.host)
    loaded = load_model(
        config.model_path,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_cache_dtype,
        ranks=ranks,
        progress=progress,
    )
    limit = min(
        config.max_sequence_tokens or loaded.max_position_tokens, loaded.max_position_tokens
    )
    plan = LayoutPlan.derive(
        loaded.specs, tokens_per_block=config.tokens_per_block, max_sequence_tokens=limit
    )
    sizing = SizingDemand(
        chunk_tokens=config.max_batch_tokens, typical_sequence_tokens=min(limit, 2048)
    )
    hooks = declarations.of(loaded.facts.family)
    if config.runtime_hooks is not None:
        logger.info("runtime hooks of %s: %s", loaded.facts.family, hooks.declared)
    refuse_idle(hooks, plan)
    planner = planner_of(hooks, config)
    cache = manager_class(hooks, UnifiedKVCacheManager)
    means = StepMeans(
        on_gpu=loaded.device.type == "cuda",
        no_graphs=no_capture(loaded),
        has_states=any(group.life_cycle.is_state for group in plan.layer_groups),
    )
    ways = step_ways(config, means)
    steps = BucketedSteps(loaded) if ways.decode_graphs else PlainSteps(loaded)

    def executor_over(storage: TorchStorage, longest: int = limit) -> RankExecutor:
        runner = steps.runner(plan, storage, StepLimits(config.max_running, longest))
        if isinstance(ranks, DpRanks):
            return DpExecutor(DpRunner(runner, ranks), loaded.device)
        return ModelExecutor(runner, loaded.device, ways.under_way)

    memory = memory_of(loaded.device)
    candidate = Candidate(
        plan=plan,
        manager=cache,
        demand=sizing,
        ranks=ranks,
        device=loaded.device,
        max_sequence_tokens=limit,
        executor_over=executor_over,
    )
    size = size_cache(config, candidate, memory, progress)
    slots = cache.slots_for(plan, size.quota_bytes, sizing)
    host_slots = plan.host_slots_for(config.host_cache_bytes, slots)
    storage = TorchStorage(plan, slots, loaded.device, host_slots=host_slots)

    def pages_over(copier: PageCopier) -> UnifiedKVCacheManager:
        return cache(
            plan,
            slots,
            copier,
            incarnation=str(config.incarnation),
            host_slots=host_slots,
            low_priority_snapshot_prompt_len=hooks.hybrid_cache.low_priority_snapshot_prompt_len,
        )

    pages = pages_over(storage)
    demand = PageDemand(plan, max_chunk_tokens=config.max_batch_tokens)
    longest = min(limit, demand.longest(RankManager(pages).total_slots()))
    if longest < 2:
        raise ValueError(f"{size.quota_bytes} bytes of KV cache hold {longest} tokens; give more")
    in_host_memory = f", {min(host_slots)} more in host memory" if any(host_slots) else ""
    progress(
        f"KV cache: {min(slots)} blocks of {plan.tokens_per_block} tokens, "
        f"{kv_dtypes(loaded.specs)}, {plan.pool_bytes(slots) / 1e6:.0f} MB{in_host_memory}; "
        f"sequences of up to {longest} tokens; {ways}"
    )
    if memory is not None:
        limit_torch(memory, size.needs, hooks.torch_mem_safety_margin)
    executor = executor_over(storage, longest)
    return RankCore(
        loaded, hooks, planner, plan, storage, pages, pages_over, executor, demand, longest
    )


def warm_up(core: RankCore) -> None:
    """Capture decode steps, then compute a short prompt and one more token, so that the first
    request finds everything in place. All ranks do so at once.
    """
    core.executor.prepare()
    manager = RankManager(core.pages)
    tokens = np.zeros(min(WARM_UP_TOKENS, core.max_sequence_tokens - 1) + 1, dtype=np.int32)
    cache = manager.open(b"", tokens, max_match=0)
    nothing = tokens[:0]
    draws = (Draw(SamplingParams(), 0, 0, nothing, nothing, ()),)
    for start, end in ((0, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        if cache.grow(end):
            core.executor.rehearse(
                [Slice(cache.name, tokens[start:end], start, cache.block_tables(), draws)]
            )
            cache.advance(end)
    cache.close()


def make_engine(
    core: RankCore,
    config: WorkerConfig,
    transfers: Transfers,
    output: Output,
    clock: Clock,
    followers: Sequence[Follower],
) -> Engine:
    """The engine over this rank and those that follow it."""
    manager: CacheManager = RankManager(core.pages)
    agreement: Agreement = OnlyRank()
    others: tuple[GroupParts, ...] = ()
    if config.attention_dp_size > 1:
        others = tuple(_group_of(core, follower) for follower in followers)
    elif followers:
        manager = leader = LeaderManager(core.pages, followers)
        transfers = agreement = LeaderTransfers(transfers, leader, 1 + len(followers))
    return Engine(
        EngineParts(
            incarnation=config.incarnation,
            manager=manager,
            transfers=transfers,
            executor=core.executor,
            output=output,
            clock=clock,
            demand=core.demand,
            agreement=agreement,
            others=others,
            interpreter=SharedInterpreter(),
        ),
        EngineLimits(
            max_sequence_tokens=core.max_sequence_tokens,
            vocab_size=core.loaded.vocab_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            quarantine_limit_blocks=config.quarantine_limit_blocks,
            quarantine_grace_ms=config.quarantine_grace_ms,
            pulls=PullLimits(
                least_tokens=config.least_pull_tokens, timeout_ms=config.pull_timeout_ms
            ),
            demotion=demotion_of(config, core.hooks),
            planner=core.planner,
        ),
    )


def _group_of(core: RankCore, follower: Follower) -> GroupParts:
    """The books of another rank's pages, which are as many as this one's, and its log."""
    manager = LeaderManager(core.pages_over(ElsewhereCopied()), (follower,))
    transfers = GroupTransfers(manager)
    return GroupParts(manager, transfers, transfers)


def demotion_of(config: WorkerConfig, hooks: RuntimeHooks) -> Demotion | None:
    """The configured demotion; without a threshold, the one that the model may declare."""
    threshold = config.ctx_demote_uncached_tokens
    if threshold is None and hooks.exact_context_demotion:
        threshold = config.max_batch_tokens
    return None if threshold is None else Demotion(threshold, config.ctx_demote_max_iters)


def limit_threads(config: WorkerConfig) -> None:
    """Leave the other cores to other workers and to the transport."""
    torch.set_num_threads(config.torch_threads)
