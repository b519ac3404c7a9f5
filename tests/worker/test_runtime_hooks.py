"""Rows S1 to S4: what a model declares is read once, used, or refused with what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from typing_extensions import override

from kvcache_core.hooks import HookError
from kvcache_core.manager import UnifiedKVCacheManager
from services.config import ServeConfig
from tests.kvcache_core.support import plan_of
from tests.support.sim_engines import fake_plan
from transfer.identity import Incarnation
from worker.admission_planner import AdmissionPlanner, Candidate, RankLoad
from worker.config import WorkerConfig
from worker.core import demotion_of, load_core
from worker.hook_declarations import declared_hooks
from worker.runtime_hooks import (
    ALL_OFF,
    HybridCachePolicy,
    RuntimeHooks,
    manager_class,
    refuse_idle,
)
from worker.scheduler import Demotion

MODULE = """
from collections.abc import Sequence
from kvcache_core.hooks import overrides_hook
from kvcache_core.manager import UnifiedKVCacheManager
from worker.runtime_hooks import RuntimeHooks

class Half(UnifiedKVCacheManager):
    @classmethod
    @overrides_hook
    def slots_for(cls, plan, quota_bytes, demand):
        return super().slots_for(plan, quota_bytes // 2, demand)

HALF = RuntimeHooks(kv_cache_manager_cls=Half)
BY_FAMILY = {"llama": HALF}
NUMBER = 1
"""
WRONG = """
from kvcache_core.hooks import overrides_hook
from kvcache_core.manager import UnifiedKVCacheManager

class Wrong(UnifiedKVCacheManager):
    @overrides_hook
    def slots(self): ...
"""


class Planner(AdmissionPlanner):
    """Takes one request at a time."""

    @override
    def window(self) -> int:
        return 1

    @override
    def plan(
        self,
        *,
        candidates: Sequence[Candidate],
        candidate_groups: Sequence[int],
        ranks: Sequence[RankLoad],
    ) -> Sequence[int | None] | None:
        return None


def config(**fields: object) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {
            "incarnation": Incarnation.mint("a"),
            "role": "aggregated",
            "model_path": "",
            "model_name": "tiny",
            "cluster_token": "test token",
            **fields,
        }
    )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "declared_for_a_test.py").write_text(MODULE)
    (tmp_path / "wrong_for_a_test.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    return "declared_for_a_test"


def test_everything_is_off_by_default() -> None:
    off = RuntimeHooks(
        torch_mem_safety_margin=None,
        kv_cache_manager_cls=None,
        kv_balanced_admission_planner=None,
        exact_context_demotion=False,
        hybrid_cache=HybridCachePolicy(
            low_priority_snapshot_prompt_len=0, state_index_upload_kernel=False
        ),
    )
    assert off == ALL_OFF
    assert ALL_OFF.declared == "all off"
    assert RuntimeHooks(exact_context_demotion=True).declared == "exact_context_demotion=True"
    assert declared_hooks(None).of("llama") is ALL_OFF
    refuse_idle(ALL_OFF, fake_plan())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"torch_mem_safety_margin": -1}, "torch_mem_safety_margin: expected bytes .* got -1"),
        ({"torch_mem_safety_margin": "1GiB"}, "torch_mem_safety_margin: expected bytes"),
        ({"exact_context_demotion": 1}, "exact_context_demotion: expected a bool, got 1"),
        ({"hybrid_cache": None}, "hybrid_cache: expected a HybridCachePolicy, got None"),
        ({"kv_balanced_admission_planner": 3}, r"expected an object with window\(\) and plan\(\)"),
    ],
)
def test_a_declaration_of_something_else_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeHooks(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected tokens of at least 0, got -5"):
        HybridCachePolicy(low_priority_snapshot_prompt_len=-5)


def test_s3_only_a_subclass_stands_in_for_the_managers_class() -> None:
    class Other(UnifiedKVCacheManager):
        pass

    class Special(UnifiedKVCacheManager):
        pass

    assert manager_class(ALL_OFF, UnifiedKVCacheManager) is UnifiedKVCacheManager
    hooks = RuntimeHooks(kv_cache_manager_cls=Other)
    assert manager_class(hooks, UnifiedKVCacheManager) is Other
    with pytest.raises(ValueError, match=r"subclass of .*Special, .* got .*Other$"):
        manager_class(hooks, Special)
    for wrong in (dict, "Other"):
        hooks = RuntimeHooks(kv_cache_manager_cls=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"UnifiedKVCacheManager.* got (builtins\.dict|'O)"):
            manager_class(hooks, UnifiedKVCacheManager)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (RuntimeHooks(kv_balanced_admission_planner=Planner()), "attention data parallelism"),
        (
            RuntimeHooks(hybrid_cache=HybridCachePolicy(low_priority_snapshot_prompt_len=9)),
            "hybrid_cache: expected a model with recurrent layers",
        ),
        (
            RuntimeHooks(hybrid_cache=HybridCachePolicy(state_index_upload_kernel=True)),
            "state_index_upload_kernel",
        ),
    ],
)
def test_hooks_that_nobody_would_ask_are_refused(hooks: RuntimeHooks, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_idle(hooks, fake_plan())


def test_a_policy_for_states_is_taken_where_there_are_some() -> None:
    policy = HybridCachePolicy(low_priority_snapshot_prompt_len=9)
    refuse_idle(RuntimeHooks(hybrid_cache=policy), plan_of("recurrent"))


def test_a_declaration_is_imported_by_its_name(module: str) -> None:
    every = declared_hooks(f"{module}:HALF")
    hooks = every.of("llama")
    assert hooks.kv_cache_manager_cls is not None
    assert every.of("qwen3") is hooks
    by_family = declared_hooks(f"{module}:BY_FAMILY")
    assert (by_family.of("llama"), by_family.of("qwen3")) == (hooks, ALL_OFF)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("LALF", r"has no 'LALF'; it has the hooks \['HALF'\]"),
        ("NUMBER", "expected a RuntimeHooks or a mapping from model family .*, got 1"),
    ],
)
def test_a_declaration_that_is_none_is_named(module: str, attribute: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declared_hooks(f"{module}:{attribute}")


def test_a_module_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="No module named 'no_such_module'; install it"):
        declared_hooks("no_such_module:HOOKS")


@pytest.mark.usefixtures("module")
def test_an_override_that_binds_to_nothing_fails_at_the_import() -> None:
    with pytest.raises(HookError, match="their hooks are"):
        declared_hooks("wrong_for_a_test:HOOKS")


@pytest.mark.parametrize("entry", ["hooks", "a:b:c", "a b:c", ":c", "a:", "a/b.py:c"])
def test_an_entry_of_another_form_is_refused_before_anything_starts(entry: str) -> None:
    with pytest.raises(ValidationError, match="expected module:attribute"):
        ServeConfig(runtime_hooks=entry)
    with pytest.raises(ValidationError, match="expected module:attribute"):
        config(runtime_hooks=entry)


def test_the_configured_threshold_wins_over_the_declared_demotion() -> None:
    exact = RuntimeHooks(exact_context_demotion=True)
    assert demotion_of(config(), ALL_OFF) is None
    assert demotion_of(config(max_batch_tokens=256), exact) == Demotion(256, 8)
    given = config(ctx_demote_uncached_tokens=1000, ctx_demote_max_iters=3)
    assert demotion_of(given, exact) == demotion_of(given, ALL_OFF) == Demotion(1000, 3)


def test_a_worker_sizes_and_makes_its_cache_by_the_declared_class(
    module: str, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="worker")
    given = {"model_path": str(tiny_model("llama")), "kv_cache_bytes": 2_000_000}
    plain = load_core(config(**given), None, lambda line: None)
    halved = load_core(
        config(**given, runtime_hooks=f"{module}:BY_FAMILY"), None, lambda line: None
    )
    assert type(plain.pages) is UnifiedKVCacheManager
    assert type(halved.pages).__name__ == "Half"
    assert 0 <= plain.storage.slots[0] - 2 * halved.storage.slots[0] <= 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum("in place of" in line for line in lines) == 1
    assert sum("runtime hooks of llama: kv_cache_manager_cls=" in line for line in lines) == 1
