"""Which blocks of a request a rank holds in one layer group, and where among its own.

Ordinals count the blocks of the whole sequence. Rank r of cp n holds blocks ``r, r + n, ...``, as
its own blocks ``0, 1, ...``. Of a window only blocks live that a token behind the prompt can still
see. A state is one page a request, told by the prompt's last block: it is final when that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache_core.arithmetic import ceil_div
from kvcache_core.life_cycle import LifeCycle, LifeCycleKind
from kvcache_core.spec import ReusePolicy
from transfer.rank_info import PageGroup, RankInfo

Ordinals = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class BlockPairs:
    """Blocks that go from one rank to another, ascending; three int32 arrays of one length."""

    ordinals: Ordinals
    """Over the whole sequence."""
    sender_positions: Ordinals
    """Among the sender's own blocks of the request."""
    receiver_positions: Ordinals


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What one rank holds of any request in one layer group."""

    life_cycle: LifeCycle
    tokens_per_block: int
    cp_size: int
    cp_rank: int

    @classmethod
    def of(cls, info: RankInfo, group: PageGroup) -> HeldBlocks:
        """What the rank says. Raises ValueError for a kind of group that we do not know."""
        kind = LifeCycleKind(group.kind)
        # Policies decide about reuse; what is stale does not depend on them.
        life_cycle = LifeCycle(kind, group.window, group.sink_blocks, ReusePolicy.REQUIRED)
        return cls(life_cycle, info.tokens_per_block, info.shape.cp_size, info.shape.cp_rank)

    def live(self, first_block: int, end_block: int, prompt_tokens: int) -> Ordinals:
        """Blocks of ``[first_block, end_block)`` that this rank needs once it has the prompt.

        Raises ValueError for blocks outside the prompt.
        """
        prompt_blocks = ceil_div(prompt_tokens, self.tokens_per_block)
        if not 0 <= first_block <= end_block <= prompt_blocks:
            raise ValueError(
                f"blocks [{first_block}, {end_block}) are not within the {prompt_blocks} blocks of "
                f"a prompt of {prompt_tokens} tokens"
            )
        if self.life_cycle.is_state:
            last = prompt_blocks - 1
            return np.arange(max(first_block, last), end_block, dtype=np.int32)
        ordinals: Ordinals = np.arange(first_block, end_block, dtype=np.int32)
        start, end = self.life_cycle.stale_range(prompt_tokens, self.tokens_per_block)
        mine = ordinals % self.cp_size == self.cp_rank
        live: Ordinals = ordinals[mine & ((ordinals < start) | (ordinals >= end))]
        return live

    def positions(self, ordinals: Ordinals) -> Ordinals:
        """Where these blocks, held here, lie among the rank's own; 0 for a state."""
        if self.life_cycle.is_state:
            return np.zeros_like(ordinals)
        return ordinals // np.int32(self.cp_size)


def block_pairs(
    sender: HeldBlocks, receiver: HeldBlocks, span: tuple[int, int], prompt_tokens: int
) -> BlockPairs:
    """Blocks in ``span`` that the receiver needs and the sender holds.

    Raises ValueError for blocks outside the prompt, and where the sender's window has passed
    blocks that the receiver needs.
    """
    wanted = receiver.live(*span, prompt_tokens)
    if not sender.life_cycle.is_state:
        wanted = wanted[wanted % sender.cp_size == sender.cp_rank]
    held = np.isin(wanted, sender.live(*span, prompt_tokens))
    if not held.all():
        raise ValueError(
            f"the sender's window of {sender.life_cycle.window} tokens has passed "
            f"{int(np.sum(~held))} blocks that the receiver needs of a prompt of {prompt_tokens} "
            "tokens; give both the same longest sequence"
        )
    return BlockPairs(wanted, sender.positions(wanted), receiver.positions(wanted))


ALL_BLOCKS: Final = HeldBlocks(
    LifeCycle(LifeCycleKind.ATTENTION, None, 0, ReusePolicy.REQUIRED),
    tokens_per_block=1,
    cp_size=1,
    cp_rank=0,
)
"""Full attention without context parallelism: every block, whatever its size."""
