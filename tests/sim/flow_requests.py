"""Virtual time, and what simulated clients ask for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.support.fake_tokens import fake_token
from worker.token_runs import FinishReason

PROMPT_TOKENS = 100


class SimClock:
    """Virtual time and what happens in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``when``, in the order of calls when times are equal."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def run(self, limit: int = 100_000) -> None:
        """Until nothing is left to happen."""
        for _ in range(limit):
            if not self._queue:
                return
            self.now, _, action = heapq.heappop(self._queue)
            action()
        raise AssertionError("the simulation does not end")


@dataclass(frozen=True)
class SimRequest:
    """What a client asks for and does."""

    request_id: str
    n: int
    max_tokens: int
    stop_tokens: frozenset[int]
    seed: int
    deadline: float
    cancel_at: float | None = None
    stop_choice_at: tuple[float, int] | None = None

    def token(self, choice: int, index: int) -> int:
        """The right token, without its attempt."""
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
        return fake_token(prompt, self.seed, choice, index)

    def finish_after(self, choice: int, index: int) -> FinishReason | None:
        """How the choice finishes with the token at ``index``."""
        if self.token(choice, index) in self.stop_tokens:
            return "stop"
        return "length" if index + 1 >= self.max_tokens else None

    def expected(self, choice: int) -> list[int]:
        """All tokens of a choice that nobody stops."""
        tokens: list[int] = []
        while not tokens or self.finish_after(choice, len(tokens) - 1) is None:
            tokens.append(self.token(choice, len(tokens)))
        return tokens
