"""Physical pools. The only part of kvcache_core that may import torch."""

from kvcache_core.storage.codec import NarrowingCodec, PageCodec
from kvcache_core.storage.torch_storage import TorchStorage
from kvcache_core.storage.upload import PairUpload, VectorUpload

__all__ = ["NarrowingCodec", "PageCodec", "PairUpload", "TorchStorage", "VectorUpload"]
