"""Block keys: a sha256 chain over scope and tokens.

SECURITY INVARIANT: a key is the only thing that decides whether two requests share pages; tokens
are not compared again. So keys are whole sha256 digests, the scope (model, adapter, cache salt)
enters first, and nobody but a router may truncate them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
TOKEN_BYTES = 4

Tokens = Sequence[int] | npt.NDArray[np.int32]


def pack_tokens(tokens: Tokens) -> bytes:
    """Tokens as little-endian int32. Raises OverflowError for a value outside int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def root_key(scope: bytes) -> bytes:
    """Parent key of the first block of a scope."""
    return hashlib.sha256(b"pageferry kv scope\0" + scope).digest()


def child_key(parent: bytes, packed_tokens: bytes) -> bytes:
    """Key of the block of ``packed_tokens`` that follows the block with key ``parent``."""
    return hashlib.sha256(parent + packed_tokens).digest()


def prefix_keys(scope: bytes, tokens: Tokens, tokens_per_block: int) -> list[bytes]:
    """Keys of all full blocks of ``tokens``, in order."""
    packed = pack_tokens(tokens)
    size = tokens_per_block * TOKEN_BYTES
    key = root_key(scope)
    keys = []
    for start in range(0, len(packed) - size + 1, size):
        key = child_key(key, packed[start : start + size])
        keys.append(key)
    return keys
