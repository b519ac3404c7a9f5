"""Which network, attention and decode steps a loaded model runs with: decided here alone.

Decode steps of a hot family on a CUDA device may go to captured graphs, in which our kernels take
the place of torch's calls; mixed batches of the same model go through the same network launch by
launch. Everything else runs as its family and its device allow (``network_of``, ``backend_of``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from worker.model.backend import WIDEST_HEAD, PagedLayers
from worker.model.capture import Capture, CUDAGraphs, RunEachTime
from worker.model.decode import DecodeLimits, DecodeRunner, Decoding, buckets_for
from worker.model.feed import TokenFeed
from worker.model.fused import FUSED_FAMILIES
from worker.model.loader import LoadedModel
from worker.model.networks import FusedModel, network_of
from worker.model.runner import ModelRunner


@dataclass(frozen=True)
class StepLimits:
    """Most sequences in a step, and tokens of the longest one."""

    sequences: int
    sequence_tokens: int


def no_capture(loaded: LoadedModel) -> str | None:
    """Why decode steps of this model cannot be captured where it is; None: they can."""
    if loaded.device.type != "cuda":
        return f"device {loaded.device.type}"
    if loaded.facts.family not in FUSED_FAMILIES:
        return f"a model of family {loaded.facts.family}"
    widest = max(spec.head_dim for spec in loaded.specs)
    return None if widest <= WIDEST_HEAD else f"heads of {widest} numbers"


class PlainSteps:
    """Every step launch by launch. Takes the weights over."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._network = network_of(loaded)

    def runner(self, plan: LayoutPlan, storage: TorchStorage, limits: StepLimits) -> ModelRunner:
        """Over these pages."""
        return ModelRunner(self._loaded, plan, storage, self._network, most_draws=limits.sequences)


class BucketedSteps:
    """Decode steps in captured graphs, or on a CPU, which has none, the same steps each time (with
    kernels in Triton's interpreter). Takes the weights over. Triton is imported here: others serve
    without it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        from worker.model.kernel_layers import KERNEL_PARTS

        self._loaded = loaded
        self._network = FusedModel(loaded, KERNEL_PARTS)

    def runner(self, plan: LayoutPlan, storage: TorchStorage, limits: StepLimits) -> ModelRunner:
        """Over these pages."""
        from worker.model.triton_backend import TritonBackend

        loaded, network = self._loaded, self._network

        def decoding(layers: PagedLayers, feed: TokenFeed) -> DecodeRunner:
            decode_limits = DecodeLimits(buckets_for(limits.sequences), limits.sequence_tokens)
            step = TritonBackend(layers).over
            made = Decoding(network, step, _capture(loaded.device), decode_limits)
            return DecodeRunner(layers.geometries, loaded.device, made, feed)

        return ModelRunner(
            loaded, plan, storage, network, TritonBackend, decoding, most_draws=limits.sequences
        )


def _capture(device: torch.device) -> Capture:
    return CUDAGraphs(device) if device.type == "cuda" else RunEachTime()
