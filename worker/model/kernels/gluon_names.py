"""Two names of Gluon, Triton's language one level below, that differ between its versions.

PyTorch's CUDA builds bring Triton 3.6; a CPU has what is newest.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Copy a box of a tensor to shared memory, and tell a barrier."""
wait_for_group = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Until all warps of the same part of a program are here."""
