"""How many slots a sequence takes at most, per pool group: the arithmetic behind admission.

Full attention needs every block, a window only what it can see while a chunk is appended, a
recurrent state one slot. A prompt that is shipped holds what a window has passed until it is sent.
The same function gives what is held and what will be needed, so that their difference is what is
still to get.
"""

from __future__ import annotations

from kvcache_core.layout import LayoutPlan
from worker.scheduler import Slots


class PageDemand:
    """Slots per pool group of sequences under one layout plan."""

    def __init__(self, plan: LayoutPlan, *, max_chunk_tokens: int) -> None:
        self._pool_groups = len(plan.pool_groups)
        self.tokens_per_block = plan.tokens_per_block
        self._full = [0] * self._pool_groups
        self._states = [0] * self._pool_groups
        self._peaks: dict[int, Slots] = {}
        """By blocks: asked for every running sequence of every step."""
        self._windows: list[tuple[int, int]] = []
        for group in plan.layer_groups:
            if group.life_cycle.is_state:
                self._states[group.pool_group] += 1
            elif group.life_cycle.is_full:
                self._full[group.pool_group] += 1
            else:
                most = group.life_cycle.most_live_blocks(max_chunk_tokens, plan.tokens_per_block)
                self._windows.append((group.pool_group, most))

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.tokens_per_block)

    def peak(self, tokens: int) -> Slots:
        """Most slots a sequence holds at once while it is computed up to ``tokens`` tokens."""
        blocks = self.blocks(tokens)
        known = self._peaks.get(blocks)
        if known is None:
            known = self._peaks[blocks] = self._peak(blocks)
        return known

    def _peak(self, blocks: int) -> Slots:
        slots = [
            full * blocks + states for full, states in zip(self._full, self._states, strict=True)
        ]
        for pool_group, most in self._windows:
            slots[pool_group] += min(blocks, most)
        return tuple(slots)

    def shipped(self, tokens: int, total: Slots) -> Slots:
        """As :meth:`peak` for a prompt whose blocks are sent as they are computed: every block that
        leaves a window is held until it is sent.

        Nothing may have been sent yet; but what passed blocks may hold ends at half of a pool: a
        prompt too long for that counts on its own transfer, so that others can run beside it.
        """
        blocks = self.blocks(tokens)
        passed = [0] * self._pool_groups
        for pool_group, most in self._windows:
            passed[pool_group] += max(0, blocks - most)
        return tuple(
            need + min(more, slots // 2)
            for need, more, slots in zip(self.peak(tokens), passed, total, strict=True)
        )

    def fresh(self, tokens: int, branches: int) -> Slots:
        """``tokens`` tokens without any pages yet, from which ``branches`` more sequences fork off.

        A branch takes a private copy of the partial block and one block to grow into.
        """
        branch = self.peak(2 * self.tokens_per_block)
        return tuple(
            need + branches * more for need, more in zip(self.peak(tokens), branch, strict=True)
        )

    def longest(self, total: Slots) -> int:
        """Tokens of the longest sequence that pools of ``total`` slots can hold alone; 0 when not
        even one block.
        """
        low, high = 0, max(total) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if all(
                need <= have
                for need, have in zip(self.peak(middle * self.tokens_per_block), total, strict=True)
            ):
                low = middle
            else:
                high = middle
        return low * self.tokens_per_block
