"""How long pages deserve to stay cached: 0 is lost first, 100 last, 35 by default.

A snapshot of recurrent states is worth much for a long prompt and little for a short one, which is
computed again quickly; so states may have a priority of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_core.groups import LayerGroup
from kvcache_core.pages import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY


@dataclass(frozen=True, kw_only=True)
class PagePriorities:
    """Priority of a sequence's pages, by what they hold. Raises ValueError outside 0..100."""

    attention: int = DEFAULT_PRIORITY
    state: int = DEFAULT_PRIORITY

    def __post_init__(self) -> None:
        for name, value in (("attention", self.attention), ("state", self.state)):
            if not MIN_PRIORITY <= value <= MAX_PRIORITY:
                raise ValueError(
                    f"{name} priority must be in {MIN_PRIORITY}..{MAX_PRIORITY}, got {value}"
                )

    @classmethod
    def of_prompt(cls, prompt_tokens: int, low_state_priority_below_tokens: int) -> PagePriorities:
        """States of prompts shorter than the limit are lost first; a limit of 0 turns it off."""
        if prompt_tokens < low_state_priority_below_tokens:
            return cls(state=MIN_PRIORITY)
        return cls()

    def of(self, group: LayerGroup) -> int:
        """Priority of the pages of one layer group."""
        return self.state if group.life_cycle.is_state else self.attention
