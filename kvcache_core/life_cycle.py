"""How long a block's pages stay needed: the arithmetic of windows, sinks and states.

Layers with equal life cycles form one layer group. A block of a group is *stale* once no future
token can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvcache_core.arithmetic import ceil_div
from kvcache_core.spec import KVCacheLayerSpec, ReusePolicy, normalized_window


class LifeCycleKind(Enum):
    """ATTENTION has one page a block; STATE has one page a sequence, and snapshots."""

    ATTENTION = "attention"
    STATE = "state"


@dataclass(frozen=True)
class LifeCycle:
    """Key of a layer group. ``window`` is None for full attention and for states.

    ``look_ahead_tokens``: KV of a position depends on so many tokens after it, and is not reused
    where those may differ. ``needs_hidden_states``: KV of a reused prefix cannot be made up for
    from its tokens alone.
    """

    kind: LifeCycleKind
    window: int | None
    sink_blocks: int
    policy: ReusePolicy
    look_ahead_tokens: int = 0
    needs_hidden_states: bool = False

    @classmethod
    def of(
        cls, spec: KVCacheLayerSpec, tokens_per_block: int, max_sequence_tokens: int | None
    ) -> LifeCycle:
        """The life cycle of one layer, its window normalised against the longest sequence."""
        if spec.is_recurrent:
            return cls(LifeCycleKind.STATE, None, 0, spec.policy, spec.look_ahead_tokens)
        window = normalized_window(spec.window, max_sequence_tokens)
        sinks = 0 if window is None else ceil_div(spec.sink_tokens, tokens_per_block)
        return cls(
            LifeCycleKind.ATTENTION,
            window,
            sinks,
            spec.policy,
            spec.look_ahead_tokens,
            spec.needs_hidden_states,
        )

    @property
    def is_state(self) -> bool:
        """True for recurrent layers."""
        return self.kind is LifeCycleKind.STATE

    @property
    def is_full(self) -> bool:
        """True when every block stays needed for the whole life of a sequence."""
        return self.kind is LifeCycleKind.ATTENTION and self.window is None

    def stale_range(self, history: int, tokens_per_block: int) -> tuple[int, int]:
        """Half-open range of block ordinals that no token at ``history`` or later can see."""
        if self.window is None:
            return (0, 0)
        start = min(ceil_div(history, tokens_per_block), self.sink_blocks)
        return (start, max(start, (history + 1 - self.window) // tokens_per_block))

    def live_blocks(self, capacity: int, history: int, tokens_per_block: int) -> int:
        """Blocks that hold pages in a sequence of ``capacity`` tokens of which ``history`` are
        final.
        """
        if self.is_state:
            return 1
        start, end = self.stale_range(history, tokens_per_block)
        return ceil_div(capacity, tokens_per_block) - (end - start)

    def most_live_blocks(self, append_tokens: int, tokens_per_block: int) -> int:
        """Most blocks a windowed sequence holds at once while it appends ``append_tokens`` a step.

        Holds as long as its committed and final tokens end in the same block between steps.
        """
        if self.window is None:
            raise ValueError("only a windowed life cycle has a bound on its live blocks")
        behind = ceil_div(self.window - 1, tokens_per_block)
        return self.sink_blocks + behind + ceil_div(append_tokens - 1, tokens_per_block) + 1
