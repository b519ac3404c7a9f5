"""Text, log-probabilities and counts of the choices of one prompt, made from its token events.

Sans IO, and the only place where tokens become text: a stream sends the deltas, a plain answer adds
them up, so that both say the same. Held-back text (an unfinished character, a possible stop string)
holds back the tokens it came from, and a choice releases everything it still holds with its last
delta.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from services.orchestration.api import ChoiceFinished, FinishReason, TokenDelta, TokenLogprob
from services.text.detokenizer import Detokenizer
from services.text.stop_strings import StopScanner, StopStrings


class InconsistentEvents(RuntimeError):
    """The cluster broke its promise of order and completeness: a bug, not an error of a client."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One counted output token."""

    token_id: int
    text_offset: int
    """Characters of the choice's text before it, stop strings not cut."""
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a choice releases at once."""

    choice: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None = None
    stop_index: int | None = None
    """Set when a stop string ended the choice: tokens at this index and after are not wanted."""


@dataclass(frozen=True)
class TextRule:
    """What of a request its text depends on."""

    stops: StopStrings
    stop_token_ids: Collection[int]
    """A token that ends the choice counts, and shows in log-probabilities, but not in the text."""
    min_tokens: int = 0
    """Stop strings are looked for in the text after this many tokens."""


class ChoiceText:
    """One choice on its way to the client."""

    def __init__(self, choice: int, detokenizer: Detokenizer, rule: TextRule) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._rule = rule
        self._scanner = StopScanner(rule.stops)
        self._pending: list[OutputToken] = []
        self._count = 0
        self._characters = 0
        self._is_finished = False

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far, the one that ended the choice included."""
        return self._count

    @property
    def is_finished(self) -> bool:
        """Whether the last delta was released."""
        return self._is_finished

    def push(self, delta: TokenDelta) -> ChoiceDelta | None:
        """Take tokens. None when nothing can be released yet, or the choice is over.

        Raises InconsistentEvents for tokens that do not follow the ones before.
        """
        if self._is_finished:
            return None
        if delta.index != self._count:
            raise InconsistentEvents(
                f"choice {self._choice}: expected output index {self._count}, got {delta.index}"
            )
        released = ""
        for rank, token_id in enumerate(delta.tokens):
            logprob = delta.logprobs[rank] if delta.logprobs else None
            self._pending.append(OutputToken(token_id, self._characters, logprob))
            text, is_stopped = self._take(token_id)
            released += text
            if is_stopped:
                return self._release(released, "stop", stop_index=self._count)
        return self._release(released, None, stop_index=None) if released else None

    def finish(self, reason: FinishReason) -> ChoiceDelta | None:
        """End the choice and release what it holds. None when it is over already."""
        if self._is_finished:
            return None
        scan = self._scanner.push(self._detokenizer.flush())
        if scan.is_match:
            return self._release(scan.text, "stop", stop_index=None)
        return self._release(scan.text + self._scanner.flush(), reason, stop_index=None)

    def _take(self, token_id: int) -> tuple[str, bool]:
        """Text that the next token releases, and whether it completes a stop string."""
        self._count += 1
        if token_id in self._rule.stop_token_ids:
            return "", False
        text = self._detokenizer.push(token_id)
        self._characters += len(text)
        if self._count <= self._rule.min_tokens:
            return text, False
        scan = self._scanner.push(text)
        return scan.text, scan.is_match

    def _release(
        self, text: str, finish: FinishReason | None, *, stop_index: int | None
    ) -> ChoiceDelta:
        self._is_finished = finish is not None
        tokens, self._pending = tuple(self._pending), []
        return ChoiceDelta(self._choice, text, tokens, finish, stop_index)


class PromptText:
    """All choices of one prompt."""

    def __init__(self, choices: tuple[ChoiceText, ...]) -> None:
        self._choices = choices

    @property
    def is_finished(self) -> bool:
        """Whether the client has everything of every choice."""
        return all(choice.is_finished for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(choice.completion_tokens for choice in self._choices)

    def handle(self, event: TokenDelta | ChoiceFinished) -> ChoiceDelta | None:
        """Take an event of the prompt's stream."""
        choice = self._choices[event.choice]
        if isinstance(event, TokenDelta):
            return choice.push(event)
        return choice.finish(event.reason)
