"""What a layer keeps per token or per sequence: owner, buffers by role, window, reuse policy.

A spec is frozen and validated when it is made; everything about bytes follows from it and from the
cluster's ``tokens_per_block`` (layout.py). Nothing here knows pools, slots or devices. A recurrent
layer has state buffers of fixed size instead of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class KVCacheLayerOwner(Enum):
    """Which network a layer belongs to."""

    TARGET = "target"
    DRAFT = "draft"


class ReusePolicy(Enum):
    """How a layer's pages take part in prefix reuse.

    REQUIRED pages constrain every match. OPTIONAL pages are reused where complete and rebuilt where
    not. PRIVATE pages are never published and never transferred.
    """

    REQUIRED = "required"
    OPTIONAL = "optional"
    PRIVATE = "private"


class BufferRole(Enum):
    """What a buffer holds."""

    KEY = "key"
    VALUE = "value"
    KEY_SCALE = "key_scale"
    VALUE_SCALE = "value_scale"
    INDEX_KEY = "index_key"
    CONV_STATE = "conv_state"
    RECURRENT_STATE = "recurrent_state"


STATE_ROLES = frozenset({BufferRole.CONV_STATE, BufferRole.RECURRENT_STATE})


class IndexKind(Enum):
    """In which unit the kernels of a layer count pages (index_space.py gives the arithmetic).

    RAW_SLOT counts slots, as kernels do that take slot strides. SHARED counts the layer's own pages
    from its own base, so that one list of indices serves all layers of a group. PER_LAYER counts
    them from the pool's base, so that one pointer serves all layers.
    """

    RAW_SLOT = "raw_slot"
    SHARED = "shared"
    PER_LAYER = "per_layer"


class ElementType(Enum):
    """Type of one stored element. PACKED4 holds two elements a byte, its scales live in buffers of
    their own.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3 = "float8_e4m3"
    UINT8 = "uint8"
    PACKED4 = "packed4"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    @classmethod
    def named(cls, name: str) -> ElementType:
        """The element type of a name: ours (``float8_e4m3``) or torch's (``float8_e4m3fn``, with
        or without ``torch.``). Raises ValueError.
        """
        short = name.removeprefix("torch.")
        try:
            return cls(_ALIASES.get(short, short))
        except ValueError:
            known = [element.value for element in cls]
            raise ValueError(f"no element type {name!r}; expected one of {known}") from None

    def bytes_of(self, elements: int) -> int:
        """Bytes of ``elements`` elements. Raises ValueError when they do not fill whole bytes."""
        bits = elements * self.bits
        if bits % 8:
            raise ValueError(
                f"{elements} elements of {self.value} fill {bits} bits; make it whole bytes"
            )
        return bits // 8


_BITS = {
    ElementType.FLOAT32: 32,
    ElementType.BFLOAT16: 16,
    ElementType.FLOAT16: 16,
    ElementType.FLOAT8_E4M3: 8,
    ElementType.UINT8: 8,
    ElementType.PACKED4: 4,
}
_ALIASES = {"float8_e4m3fn": "float8_e4m3", "half": "float16", "float": "float32"}


class PageMapping(Enum):
    """How a page is laid out, hence how it splits between ranks of different tensor parallel sizes.

    HEAD_MAJOR ``[num_heads, tokens, elements]`` splits by head; REPLICATED is the same on every
    rank; SECTIONED is a row of sections of which each splits alone (convolution state).
    """

    HEAD_MAJOR = "head_major"
    REPLICATED = "replicated"
    SECTIONED = "sectioned"


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """One buffer of one layer: pages of ``[num_heads, tokens_per_page, elements_per_head]``.

    ``tokens_per_page`` None means one page a block; otherwise it divides the block and a block
    holds several pages in a row. State buffers hold ``[num_heads, elements_per_head]`` per
    sequence. ``sections`` gives the elements of each section of a SECTIONED page and sums to the
    page's elements.
    """

    role: BufferRole
    dtype: ElementType
    num_heads: int
    elements_per_head: int
    tokens_per_page: int | None = None
    coalescing_group: int = 0
    mapping: PageMapping = PageMapping.HEAD_MAJOR
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.elements_per_head < 1:
            raise ValueError(
                f"{self.role.value} buffer: num_heads and elements_per_head must be at least 1, "
                f"got {self.num_heads} and {self.elements_per_head}"
            )
        if self.tokens_per_page is not None and (self.tokens_per_page < 1 or self.is_state):
            raise ValueError(
                f"{self.role.value} buffer: tokens_per_page {self.tokens_per_page} is "
                "not possible; give a positive number, and None for states"
            )
        if (self.mapping is PageMapping.SECTIONED) != bool(self.sections):
            raise ValueError(
                f"{self.role.value} buffer: sections belong to SECTIONED pages and only to them"
            )
        if self.sections and sum(self.sections) != self.num_heads * self.elements_per_head:
            raise ValueError(
                f"{self.role.value} buffer: sections sum to {sum(self.sections)}, "
                f"the page has {self.num_heads * self.elements_per_head} elements"
            )
        self.dtype.bytes_of(self.elements_per_head)

    @property
    def is_state(self) -> bool:
        """True for a buffer of fixed size per sequence."""
        return self.role in STATE_ROLES

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes; for a state buffer the bytes of the whole state."""
        return self.num_heads * self.dtype.bytes_of(self.elements_per_head)


@dataclass(frozen=True, kw_only=True)
class KVCacheLayerSpec:
    """One layer of one rank.

    ``kv_factor`` is 2 for keys and values, 1 for keys only (or a latent), 0 for a recurrent layer,
    which has ``state_buffers`` instead. ``window`` None is full attention; ``sink_tokens`` first
    tokens stay visible beside a window. ``tokens_per_page`` lets kernels read pages smaller than a
    block. Elements of ``scale_block_elements`` share a one-byte scale; scales get their own
    coalescing group so that data and scales lie in two pools under one index. ``index_kind`` is
    what the layer's kernels count in. ``look_ahead_tokens``: KV of a position depends on so many
    tokens after it. ``needs_hidden_states``: a drafter fed by the target's hidden states, whose KV
    cannot be made up for from tokens where the target's is reused.
    """

    layer_id: int
    owner: KVCacheLayerOwner
    dtype: ElementType
    num_kv_heads: int
    head_dim: int
    kv_factor: int = 2
    window: int | None = None
    sink_tokens: int = 0
    policy: ReusePolicy = ReusePolicy.REQUIRED
    look_ahead_tokens: int = 0
    needs_hidden_states: bool = False
    coalescing_group: int = 0
    tokens_per_page: int | None = None
    scale_block_elements: int | None = None
    scale_coalescing_group: int = 1
    index_kind: IndexKind = IndexKind.RAW_SLOT
    extra_buffers: tuple[BufferSpec, ...] = ()
    state_buffers: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.layer_id < 0:
            raise self._error(f"layer_id must not be negative, got {self.layer_id}")
        if self.look_ahead_tokens < 0:
            raise self._error(
                f"look_ahead_tokens must not be negative, got {self.look_ahead_tokens}"
            )
        if self.state_buffers:
            self._check_recurrent()
        else:
            self._check_attention()
        roles = [buffer.role for buffer in self.buffers]
        if len(set(roles)) != len(roles):
            raise self._error(f"each role may occur once, got {[role.value for role in roles]}")

    def _error(self, message: str) -> ValueError:
        return ValueError(f"layer {self.layer_id} ({self.owner.value}): {message}")

    def _check_recurrent(self) -> None:
        if self.kv_factor or self.num_kv_heads or self.head_dim or self.extra_buffers:
            raise self._error(
                "a layer with state buffers has kv_factor, num_kv_heads and head_dim 0"
            )
        if self.window is not None or self.sink_tokens:
            raise self._error("a layer with state buffers has neither window nor sink tokens")
        if not all(buffer.is_state for buffer in self.state_buffers):
            raise self._error(
                "state_buffers may only have the roles CONV_STATE and RECURRENT_STATE"
            )

    def _check_attention(self) -> None:
        if self.kv_factor not in (1, 2):
            raise self._error(
                f"kv_factor must be 1 (keys only) or 2 (keys and values), got {self.kv_factor}"
            )
        if self.num_kv_heads < 1 or self.head_dim < 1:
            raise self._error(
                "num_kv_heads and head_dim must be positive, "
                f"got {self.num_kv_heads} and {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise self._error(f"window must be positive or None, got {self.window}")
        if self.sink_tokens < 0 or (self.sink_tokens and self.window is None):
            raise self._error(
                f"sink_tokens {self.sink_tokens} needs a window and must not be negative"
            )
        if self.dtype is ElementType.PACKED4:
            if self.head_dim % 2:
                raise self._error(f"packed 4-bit data needs an even head_dim, got {self.head_dim}")
            if self.scale_block_elements is None:
                raise self._error("packed 4-bit data needs scale_block_elements")
        block = self.scale_block_elements
        if block is not None and (block < 1 or self.head_dim % block):
            raise self._error(f"scale_block_elements {block} must divide head_dim {self.head_dim}")
        if block is not None and self.scale_coalescing_group == self.coalescing_group:
            raise self._error("data and scales need different coalescing groups")
        if any(buffer.is_state for buffer in self.extra_buffers):
            raise self._error("extra_buffers may not hold states; make it a recurrent layer")

    @property
    def is_recurrent(self) -> bool:
        """True for a layer that keeps a state per sequence instead of keys and values."""
        return bool(self.state_buffers)

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Every buffer of the layer: keys, values, their scales, extras; or the states."""
        if self.state_buffers:
            return self.state_buffers
        roles = (BufferRole.KEY, BufferRole.VALUE)[: self.kv_factor]
        data = tuple(
            self._head_major(role, self.dtype, self.head_dim, self.coalescing_group)
            for role in roles
        )
        if self.scale_block_elements is None:
            return data + self.extra_buffers
        elements = self.head_dim // self.scale_block_elements
        roles = (BufferRole.KEY_SCALE, BufferRole.VALUE_SCALE)[: self.kv_factor]
        scales = tuple(
            self._head_major(role, ElementType.UINT8, elements, self.scale_coalescing_group)
            for role in roles
        )
        return data + scales + self.extra_buffers

    def _head_major(
        self, role: BufferRole, dtype: ElementType, elements: int, group: int
    ) -> BufferSpec:
        return BufferSpec(
            role=role,
            dtype=dtype,
            num_heads=self.num_kv_heads,
            elements_per_head=elements,
            tokens_per_page=self.tokens_per_page,
            coalescing_group=group,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in all buffers of the layer; 0 for a recurrent layer."""
        return 0 if self.is_recurrent else sum(buffer.bytes_per_token for buffer in self.buffers)

    def role_bytes_per_token(self, role: BufferRole) -> int:
        """Bytes a token takes in one buffer of the layer, extra buffers too; 0 without the role."""
        held = (buffer for buffer in self.buffers if not buffer.is_state)
        return sum(buffer.bytes_per_token for buffer in held if buffer.role is role)

    @property
    def state_bytes(self) -> int:
        """Bytes a sequence takes whatever its length; 0 for attention."""
        return sum(buffer.bytes_per_token for buffer in self.state_buffers)


def normalized_window(window: int | None, max_sequence_tokens: int | None) -> int | None:
    """The window that limits anything: None when it covers the longest possible sequence."""
    if window is None or (max_sequence_tokens is not None and window >= max_sequence_tokens):
        return None
    return window


def recurrent_layer(
    layer_id: int,
    owner: KVCacheLayerOwner,
    state_buffers: Sequence[BufferSpec],
    policy: ReusePolicy = ReusePolicy.REQUIRED,
) -> KVCacheLayerSpec:
    """The spec of a layer that keeps a state of fixed size per sequence."""
    return KVCacheLayerSpec(
        layer_id=layer_id,
        owner=owner,
        dtype=state_buffers[0].dtype,
        num_kv_heads=0,
        head_dim=0,
        kv_factor=0,
        policy=policy,
        state_buffers=tuple(state_buffers),
    )


def owner_of(specs: Sequence[KVCacheLayerSpec], layer_id: int) -> KVCacheLayerOwner:
    """Owner of one layer. Raises KeyError for a layer the specs do not have."""
    for spec in specs:
        if spec.layer_id == layer_id:
            return spec.owner
    raise KeyError(f"no layer {layer_id} in these specs")


def layer_ids(specs: Sequence[KVCacheLayerSpec], owner: KVCacheLayerOwner) -> tuple[int, ...]:
    """Ids of the layers of one owner, ascending."""
    return tuple(sorted(spec.layer_id for spec in specs if spec.owner is owner))
