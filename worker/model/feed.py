"""The tokens that the last step drew, on the device: what the step behind it goes on from.

They stay in the same memory, so that a captured graph reads them wherever it is launched. Steps and
draws are queued in order: a step has read them before its own draws replace them.
"""

from __future__ import annotations

import torch

from worker.model.rank_sum import RankSum


class TokenFeed:
    """int64 ``[most]``; the draws of one step by number."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)

    def put(self, drawn: torch.Tensor) -> None:
        """Tokens of all draws of a step, int64 ``[draws]``, on the device.

        Raises:
            ValueError: there are more than it was made for.
        """
        if len(drawn) > len(self._tokens):
            raise ValueError(
                f"expected at most {len(self._tokens)} draws a step, got {len(drawn)}; sequences "
                "that draw are at most max_running"
            )
        self._tokens[: len(drawn)].copy_(drawn)

    def take_from_leader(self, ranks: RankSum) -> None:
        """All ranks have the leader's tokens, who alone draws."""
        if ranks.shard.rank:
            self._tokens.zero_()
        ranks.add_up(self._tokens)

    def filled(self, tokens: torch.Tensor, feeds: torch.Tensor) -> torch.Tensor:
        """``tokens`` ``[T]``, but a draw where ``feeds`` ``[T]`` has its number and not -1."""
        drawn = self._tokens.index_select(0, feeds.clamp(min=0))
        return torch.where(feeds >= 0, drawn, tokens)
