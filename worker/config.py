"""Everything one worker process needs to know, as one frozen value that crosses the process
boundary once.

Loads no torch: the launcher and front ends import this file.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from transfer.identity import Incarnation
from worker.messages import WorkerRole

ElementType = Literal["auto", "float32", "bfloat16", "float16"]
DpAdmission = Literal["in_order", "kv_balanced"]
"""At once, each where most room is; or the oldest few together, the largest first, and only where
there is room.
"""
KVElementType = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
"""fp8 is float8_e4m3."""

HOOKS_ENTRY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _hooks_entry(value: str) -> str:
    if not HOOKS_ENTRY.fullmatch(value):
        raise ValueError(f"expected module:attribute, such as my_models.hooks:LLAMA, got {value!r}")
    return value


HooksEntry = Annotated[str, AfterValidator(_hooks_entry)]
"""Names a declaration of runtime hooks as ``module:attribute``."""


class WorkerConfig(BaseModel):
    """Configuration of one rank; but for ``rank`` all ranks of an instance have the same. Byte
    sizes are per rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    incarnation: Incarnation
    role: WorkerRole
    model_path: str
    """A Hugging Face directory or a GGUF file."""
    model_name: str
    device: str = "cpu"
    dtype: ElementType = "auto"
    """auto: float32 on CPU, the checkpoint's type on GPU."""
    kv_cache_dtype: KVElementType = "auto"
    """Of keys and values in pages; auto: that of the weights. Anything else than that and fp8 is
    refused.
    """
    host: str = "127.0.0.1"
    port: int = 0
    """Port for front ends; 0 takes a free one."""
    control_port: int = 0
    """Port for other workers; 0 takes a free one."""
    cluster_token: str = Field(repr=False)
    tokens_per_block: int = Field(default=64, ge=1)
    kv_cache_bytes: int | None = Field(default=1 << 30, gt=0)
    """None: measured, on a GPU that no other instance shares."""
    kv_cache_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of what is measured to be free beside weights, a step and transfers."""
    staging_pairs: int = Field(default=0, ge=0)
    """Ranks of other instances that pages may travel to or from, for whose staging a GPU is to
    have room."""
    host_cache_bytes: int = Field(default=0, ge=0)
    """Host memory for pages that the cache has no room for."""
    max_sequence_tokens: int | None = None
    """None: the model's own limit. Never more than the pools can hold."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Token budget of one step; longer prompts are prefilled in chunks of this size."""
    max_running: int = Field(default=64, ge=1)
    """Sequences in one step at most."""
    decode_graphs: bool | None = None
    """Decode steps run in CUDA graphs, captured before the worker is ready; None: where the device
    and the model's family have them.
    """
    steps_under_way: int | None = Field(default=None, ge=1, le=2)
    """2: a step begins before the results of the one before it are seen; None: on a GPU."""
    ctx_demote_uncached_tokens: int | None = Field(default=None, ge=1)
    """Prompts that lack more tokens than this give up the privilege of the oldest for a while;
    None: none does.
    """
    ctx_demote_max_iters: int = Field(default=8, ge=1)
    """Steps after which a demoted prompt has it again."""
    runtime_hooks: HooksEntry | None = None
    """What the model declares about its run (:mod:`worker.hook_declarations`)."""
    torch_threads: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks of the instance, on one host. Each has a part of every layer."""
    attention_dp_size: int = Field(default=1, ge=1)
    """1: ranks share attention as well. Else all ranks: each has whole attention and requests of
    its own, and only MLPs are shared. Then limits of steps are each rank's.
    """
    dp_admission: DpAdmission = "in_order"
    """How requests are given to the ranks then."""
    rank: int = Field(default=0, ge=0)
    """0 leads: front ends know it alone."""
    transfer_timeout_ms: int = Field(default=60_000, gt=0)
    """Floor of a transfer's deadline; bytes are added on top."""
    least_pull_tokens: int = Field(default=256, ge=1)
    """A prefix is fetched from another instance where that saves at least this many tokens."""
    pull_timeout_ms: int = Field(default=10_000, gt=0)
    """A prompt waits no longer than this for a prefix that it can compute."""
    quarantine_limit_blocks: int = Field(default=64, ge=0)
    """Above this many quarantined blocks the worker reports itself not ready."""
    quarantine_grace_ms: int = Field(default=15_000, ge=0)
    """Above the limit for this long it ends, to be replaced. Until then whoever started a dead
    peer may say that it is dead, which ends the doubt.
    """
    require_transport: str | None = None
    """Name of a transport (such as shm or cuda_ipc) without which the worker refuses to start."""

    @model_validator(mode="after")
    def _rank_is_one_of_them(self) -> WorkerConfig:
        if self.rank >= self.tensor_parallel_size:
            raise ValueError(
                f"rank: expected less than tensor_parallel_size {self.tensor_parallel_size}, got "
                f"{self.rank}"
            )
        if self.attention_dp_size not in (1, self.tensor_parallel_size):
            raise ValueError(
                f"attention_dp_size: expected 1 or tensor_parallel_size "
                f"{self.tensor_parallel_size}, got {self.attention_dp_size}"
            )
        return self


class WorkerAddress(BaseModel):
    """Where a started worker listens for front ends; a follower has port 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    incarnation: Incarnation
    role: WorkerRole
    host: str
    port: int
    pid: int
