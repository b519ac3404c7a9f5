"""The output of one choice, put together from runs that come from several connections.

Tokens leave strictly by index: what is out already is dropped, what is ahead waits. Whoever
delivers an index first wins, and what a slower connection says about it is only compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.orchestration.api import TokenDelta
from transfer.wire import unpack_ints
from worker.token_runs import FinishReason, TokenLogprob, TokenRun


@dataclass(frozen=True)
class RunEffect:
    """What a run added."""

    delta: TokenDelta | None = None
    conflict_index: int | None = None
    """First index at which the run contradicts a token that is out."""


class ChoiceProgress:
    """Tokens of one choice so far, and how it finished."""

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self._ahead: dict[int, TokenRun] = {}
        self._stopped_at: int | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens that count in usage: up to the index of a stop."""
        if self._stopped_at is None:
            return len(self.tokens)
        return min(len(self.tokens), self._stopped_at)

    def accept(self, run: TokenRun) -> RunEffect:
        """Take in a run; ``finish`` may be set afterwards."""
        tokens = (
            (int.from_bytes(run.tokens, "little", signed=True),)
            if len(run.tokens) == 4
            else tuple(unpack_ints(run.tokens).tolist())
        )
        known = len(self.tokens)
        if run.start > known:
            if self.finish is None:
                self._keep_ahead(run, len(tokens))
            return RunEffect()
        overlap = min(known - run.start, len(tokens))
        conflict = self._conflict(run.start, tokens[:overlap])
        if self.finish is not None:
            return RunEffect(conflict_index=conflict)
        fresh, logprobs = tokens[overlap:], run.logprobs[overlap:]
        self.tokens.extend(fresh)
        if run.finish is not None and run.start + len(tokens) == len(self.tokens):
            self.finish = run.finish
            self._ahead.clear()
        elif self._ahead:
            fresh, logprobs = self._catch_up(fresh, logprobs)
        if not fresh:
            return RunEffect(conflict_index=conflict)
        return RunEffect(TokenDelta(self.choice, known, fresh, logprobs), conflict)

    def stop(self, index: int) -> bool:
        """End before ``index``. Returns whether the choice was still going on."""
        self._stopped_at = index if self._stopped_at is None else min(self._stopped_at, index)
        going = self.finish is None
        if going:
            self.finish = "stop"
        self._ahead.clear()
        return going

    def drop_ahead(self) -> None:
        """Forget runs that wait for a gap: their leg is given up and may not be mixed with its
        successor.
        """
        self._ahead.clear()

    def _conflict(self, index: int, tokens: tuple[int, ...]) -> int | None:
        for offset, token in enumerate(tokens):
            if self.tokens[index + offset] != token:
                return index + offset
        return None

    def _keep_ahead(self, run: TokenRun, length: int) -> None:
        other = self._ahead.get(run.start)
        if other is None or len(other.tokens) < 4 * length or run.finish is not None:
            self._ahead[run.start] = run

    def _catch_up(
        self, fresh: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        while self.finish is None:
            index = min(self._ahead, default=len(self.tokens) + 1)
            if index > len(self.tokens):
                break
            effect = self.accept(self._ahead.pop(index))
            if effect.delta is not None:
                fresh += effect.delta.tokens
                logprobs += effect.delta.logprobs
        return fresh, logprobs
