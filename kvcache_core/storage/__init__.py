"""Physical pools. The only part of kvcache_core that may import torch."""

from kvcache_core.storage.torch_storage import TorchStorage

__all__ = ["TorchStorage"]
