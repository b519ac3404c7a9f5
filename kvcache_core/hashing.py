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
    prompt = Prompt(scope, tokens, tokens_per_block)
    return prompt.keys(prompt.blocks)


class Prompt:
    """Tokens in a scope with the keys of their full blocks, hashed once and no further than asked.

    Made where a request is first seen and handed on, so that nobody hashes it again.
    """

    __slots__ = ("_keys", "packed", "scope", "tokens_per_block")

    def __init__(self, scope: bytes, tokens: Tokens, tokens_per_block: int) -> None:
        self.scope = scope
        self.tokens_per_block = tokens_per_block
        self.packed = pack_tokens(tokens)
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def blocks(self) -> int:
        """Full blocks."""
        return len(self) // self.tokens_per_block

    @property
    def known(self) -> list[bytes]:
        """The keys hashed so far; not to be changed."""
        return self._keys

    def keys(self, blocks: int) -> list[bytes]:
        """At least the keys of the first ``blocks`` full blocks; not to be changed."""
        keys = self._keys
        if len(keys) < blocks:
            key = keys[-1] if keys else root_key(self.scope)
            extend_keys(keys, key, self.packed, len(keys), blocks, self.tokens_per_block)
        return keys


def extend_keys(
    keys: list[bytes],
    key: bytes,
    packed: bytes | bytearray,
    first: int,
    end: int,
    tokens_per_block: int,
) -> None:
    """Append the keys of blocks ``[first, end)`` of ``packed``, whose parent has ``key``."""
    size = tokens_per_block * TOKEN_BYTES
    sha256 = hashlib.sha256
    for start in range(first * size, end * size, size):
        key = sha256(key + packed[start : start + size]).digest()
        keys.append(key)
