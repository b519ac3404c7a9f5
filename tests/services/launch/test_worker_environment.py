"""What a worker's process finds in its environment."""

from __future__ import annotations

from services.environment import read_environment
from services.resources import InstancePlan
from services.worker_environment import worker_variables

PLAN = InstancePlan(
    name="context-0",
    role="context",
    device="cpu",
    gpu_fraction=0.0,
    torch_threads=3,
    kv_cache_bytes=1 << 20,
)


def test_threads_and_role_are_the_plans_whatever_was_inherited() -> None:
    found = worker_variables(PLAN, {"PAGEFERRY_ROLE": "generation", "OMP_NUM_THREADS": "64"})
    assert found["PAGEFERRY_ROLE"] == "context"
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("3", "3")


def test_large_tensors_ask_for_huge_pages_unless_the_user_says_no() -> None:
    assert worker_variables(PLAN, {})["THP_MEM_ALLOC_ENABLE"] == "1"
    given = read_environment({"HOME": "/h", "THP_MEM_ALLOC_ENABLE": "0", "OTHER": "1"}).forwarded
    assert given == {"THP_MEM_ALLOC_ENABLE": "0"}
    assert worker_variables(PLAN, given)["THP_MEM_ALLOC_ENABLE"] == "0"
