"""What the engine will ask of the pools: the one description that estimates and construction share.

A sequence in flight is written at two sites, and both size its pages the same way: a context step
writes a chunk, a decode step the tokens to verify; behind either the drafter may append its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvcache_core.arithmetic import ceil_div
from kvcache_core.groups import GroupTable, LayerGroup


class BlockAlignment(Enum):
    """How a block drafter's labels lie against its inputs: SHIFTED predicts the next token in each
    place, UNSHIFTED has one place more, for the token it starts from.
    """

    SHIFTED = "shifted"
    UNSHIFTED = "unshifted"

    def block_width(self, draft_tokens: int) -> int:
        """Places that a block of ``draft_tokens`` drafted tokens takes in the cache."""
        return draft_tokens if self is BlockAlignment.SHIFTED else draft_tokens + 1


def append_width(num_extra_tokens: int, block_width: int) -> int:
    """Tokens that a drafter may write behind a step's own: the scratch of every allocation site.

    ``num_extra_tokens`` keeps its meaning for positions, and can be less than the block.
    """
    return max(num_extra_tokens, block_width)


def capacity_of_step(history: int, new_tokens: int, scratch_tokens: int) -> int:
    """Tokens that need pages in a step: the only formula for growing a sequence."""
    return history + new_tokens + scratch_tokens


def admissible_sequences(max_batch: int, *, pipeline_stages: int = 1, admissions: int = 1) -> int:
    """Sequences that may hold pages at once.

    Each pipeline stage works on a batch of its own; ``admissions`` is 2 where received sequences
    wait beside the running batch.
    """
    return max_batch * pipeline_stages * admissions


@dataclass(frozen=True)
class BatchStep:
    """One step of a batch: (capacity, history) in tokens of each sequence."""

    sequences: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for capacity, history in self.sequences:
            if not 0 <= history <= capacity:
                raise ValueError(f"expected 0 <= history <= capacity, got {history}, {capacity}")

    def slots(self, table: GroupTable) -> tuple[int, ...]:
        """Slots per layer group."""
        return tuple(
            sum(
                group.life_cycle.live_blocks(capacity, history, table.tokens_per_block)
                for capacity, history in self.sequences
            )
            for group in table.layer_groups
        )


TYPICAL_STEP = BatchStep(((2049, 2048),))


@dataclass(frozen=True, kw_only=True)
class SizingDemand:
    """Sizes are chosen for this. All counts are of sequences or tokens.

    Without ``pool_ratios`` and ``typical_step`` the sizes follow from the counts. ``pool_ratios``
    has one share a layer group, or one a target group: then the drafter's are inserted.
    """

    chunk_tokens: int = 512
    resident_sequences: int = 1
    append_tokens: int = 1
    """Widest write of a decode step: 1, and the tokens to verify."""
    typical_sequence_tokens: int = 2048
    """Says how many windows and states a given number of tokens needs."""
    snapshots_per_sequence: int = 1
    scratch_tokens: int = 0
    """The drafter's :func:`append_width`; 0 without one."""
    preemption_headroom: int = 0
    """Sequences that may hold pages beside the resident ones."""
    dummy_sequences: int = 0
    """Sequences that pad batches: one step's pages, and a state, each."""
    snapshot_interval_tokens: int | None = None
    """Distance of regular snapshots; None takes none but ``snapshots_per_sequence``."""
    usable_percent: int = 100
    """Occupancy up to which sequences are resumed: windows get that much more."""
    pool_ratios: tuple[float, ...] | None = None
    typical_step: BatchStep | None = None
    constraints: tuple[BatchStep, ...] = ()
    """Steps each of which must fit."""

    def __post_init__(self) -> None:
        positive = {
            "chunk_tokens": self.chunk_tokens,
            "resident_sequences": self.resident_sequences,
            "append_tokens": self.append_tokens,
            "typical_sequence_tokens": self.typical_sequence_tokens,
        }
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        counts = {
            "snapshots_per_sequence": self.snapshots_per_sequence,
            "scratch_tokens": self.scratch_tokens,
            "preemption_headroom": self.preemption_headroom,
            "dummy_sequences": self.dummy_sequences,
        }
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.snapshot_interval_tokens is not None and self.snapshot_interval_tokens < 1:
            raise ValueError(
                f"snapshot_interval_tokens must be positive, got {self.snapshot_interval_tokens}"
            )
        if not 1 <= self.usable_percent <= 100:
            raise ValueError(f"usable_percent must be in 1..100, got {self.usable_percent}")
        if self.pool_ratios is not None and self.typical_step is not None:
            raise ValueError("give pool_ratios or typical_step, not both")

    @property
    def sequences(self) -> int:
        """Sequences that hold pages at once, headroom included."""
        return self.resident_sequences + self.preemption_headroom

    @property
    def decode_tokens(self) -> int:
        """Tokens beyond history at the decode site."""
        return capacity_of_step(0, self.append_tokens, self.scratch_tokens)

    @property
    def widest_step_tokens(self) -> int:
        """Tokens beyond history at the widest site."""
        return capacity_of_step(0, max(self.chunk_tokens, self.append_tokens), self.scratch_tokens)

    def dummy_slots(self, group: LayerGroup, tokens_per_block: int) -> int:
        """Slots that the dummy sequences hold in one group."""
        if group.life_cycle.is_state:
            return self.dummy_sequences
        return self.dummy_sequences * ceil_div(self.decode_tokens, tokens_per_block)

    def scratch_and_dummy_tokens(self, tokens_per_block: int) -> int:
        """Tokens of the pools that never hold a resident sequence's history."""
        dummies = self.dummy_sequences * ceil_div(self.decode_tokens, tokens_per_block)
        return self.sequences * self.decode_tokens + dummies * tokens_per_block


DEFAULT_DEMAND = SizingDemand()
