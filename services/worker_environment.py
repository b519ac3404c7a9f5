"""The variables a worker's process starts with. Libraries read them when they are loaded, before
the worker's own code could say anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.environment import ROLE
from services.resources import InstancePlan


def worker_variables(plan: InstancePlan, given: Mapping[str, str]) -> dict[str, str]:
    """Variables of an instance's processes; ``given`` is what the user has set for workers."""
    threads = str(plan.torch_threads)
    return {
        # torch asks for huge pages where it allocates much. A decode step on a CPU reads all
        # weights: it takes about a tenth less time with fewer page table walks.
        "THP_MEM_ALLOC_ENABLE": "1",
        **given,
        ROLE: plan.role,
        # torch could be told later, the maths libraries could not.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # The progress of loading comes as lines; bars are for terminals.
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
