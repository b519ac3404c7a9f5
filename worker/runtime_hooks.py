"""What a model may declare about the way it is run: one frozen record, everything off by default.

A worker reads it once, when it is made; all ranks of an instance read the same. A declaration that
nothing in the worker would ever ask for is refused. Loads no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvcache_core.layout import LayoutPlan
from kvcache_core.manager import UnifiedKVCacheManager
from worker.admission_planner import AdmissionPlanner

logger = logging.getLogger(__name__)

ManagerClass = type[UnifiedKVCacheManager]


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridCachePolicy:
    """How the cache treats recurrent states, for models that have some."""

    low_priority_snapshot_prompt_len: int = 0
    """States of prompts with fewer tokens are the first to be evicted; 0: no prompt's are."""
    state_index_upload_kernel: bool = False
    """Upload state slots and their masks in one copy. Off: no recurrent model is served yet."""

    def __post_init__(self) -> None:
        length: object = self.low_priority_snapshot_prompt_len
        if not isinstance(length, int) or length < 0:
            raise ValueError(
                f"low_priority_snapshot_prompt_len: expected tokens of at least 0, got {length!r}"
            )


DEFAULT_POLICY = HybridCachePolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeHooks:
    """Declared for a model family, see :mod:`worker.hook_declarations`."""

    torch_mem_safety_margin: int | None = None
    """Bytes of a GPU that torch leaves to others: collectives, UCX, the driver. None: 1 GiB, less
    where little is free. The size of the KV cache does not depend on it.
    """
    kv_cache_manager_cls: ManagerClass | None = None
    """Sizes and makes the KV cache in place of the class that the engine would take, of which it
    must be a subclass.
    """
    kv_balanced_admission_planner: AdmissionPlanner | None = None
    """Window and placement of KV-balanced admission across attention data parallel ranks."""
    exact_context_demotion: bool = False
    """Demote prompts that lack more tokens than a step has room for, where no threshold is
    configured. Which prompts do is decided by what they exactly lack once they are matched.
    """
    hybrid_cache: HybridCachePolicy = DEFAULT_POLICY

    def __post_init__(self) -> None:
        margin: object = self.torch_mem_safety_margin
        if margin is not None and (not isinstance(margin, int) or margin < 0):
            raise ValueError(
                f"torch_mem_safety_margin: expected bytes of at least 0 or None, got {margin!r}"
            )
        for name, value, kind in (
            ("exact_context_demotion", self.exact_context_demotion, bool),
            ("hybrid_cache", self.hybrid_cache, HybridCachePolicy),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name}: expected a {kind.__name__}, got {value!r}")  # noqa: TRY004
        planner = self.kv_balanced_admission_planner
        if planner is not None and not {"window", "plan"} <= set(dir(planner)):
            raise ValueError(
                "kv_balanced_admission_planner: expected an object with window() and plan(), got "
                f"{planner!r}"
            )

    @property
    def declared(self) -> str:
        """The fields that are not off, for a line in the log; ``all off`` where there are none."""
        pairs = [(name, getattr(self, name)) for name in self.__dataclass_fields__]
        off = RuntimeHooks.__dataclass_fields__
        given = [f"{name}={value!r}" for name, value in pairs if value != off[name].default]
        return ", ".join(given) or "all off"


ALL_OFF = RuntimeHooks()


def manager_class(hooks: RuntimeHooks, resolved: ManagerClass) -> ManagerClass:
    """The class that sizes and makes the cache: the declared one, else ``resolved``.

    Raises:
        ValueError: the declared one is no subclass of ``resolved``; both are named.
    """
    wanted: object = hooks.kv_cache_manager_cls
    if wanted is None:
        return resolved
    if not isinstance(wanted, type) or not issubclass(wanted, resolved):
        got = _name(wanted) if isinstance(wanted, type) else repr(wanted)
        raise ValueError(  # noqa: TRY004  (a configuration error like the others)
            f"kv_cache_manager_cls: expected a subclass of {_name(resolved)}, which the engine "
            f"takes for this model, got {got}"
        )
    logger.info("the KV cache is a %s in place of %s", _name(wanted), _name(resolved))
    return wanted


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def refuse_idle(hooks: RuntimeHooks, plan: LayoutPlan) -> None:
    """Refuse hooks that this worker would never ask.

    Raises:
        ValueError: a planner without attention data parallelism, a policy for recurrent states
            where there are none.
    """
    if hooks.kv_balanced_admission_planner is not None:
        raise ValueError(
            "kv_balanced_admission_planner: expected an instance with attention data parallelism "
            "and KV-balanced admission, which this one does not have; leave the hook out"
        )
    if hooks.hybrid_cache.state_index_upload_kernel:
        raise ValueError(
            "state_index_upload_kernel: expected a model whose recurrent layers this worker runs, "
            "it runs none yet; leave it off"
        )
    has_states = any(group.life_cycle.is_state for group in plan.layer_groups)
    if hooks.hybrid_cache != DEFAULT_POLICY and not has_states:
        raise ValueError(
            "hybrid_cache: expected a model with recurrent layers, this one has attention layers "
            "only; leave the hook out"
        )
