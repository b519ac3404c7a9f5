"""Two names of Gluon, Triton's language one level below, that differ between its versions.

PyTorch's CUDA builds bring Triton 3.6; a CPU has what is newest.
"""

from __future__ import annotations

try:
    from triton.experimental.gluon.language import barrier as wait_for_group
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load as load_box
except ImportError:
    from triton.experimental.gluon.language import thread_barrier as wait_for_group
    from triton.experimental.gluon.language.nvidia.hopper.tma import (
        async_copy_global_to_shared as load_box,
    )

__all__ = ["load_box", "wait_for_group"]
"""Copy a box of a tensor to shared memory and tell a barrier; wait until all warps of the same part
of a program are here.
"""
