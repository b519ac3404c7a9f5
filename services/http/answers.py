"""What every kind of answer is made from: identity, usage, and what of it the client asked to see.

:class:`Answers` is the seam between running a request and the JSON that clients of one endpoint
expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.http.assembly import ChoiceDelta, OutputToken
from services.http.generation import Usage
from services.orchestration.api import FinishReason
from services.text.tokenizer import TokenIds

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """What all chunks of one answer share, and which extras they carry."""

    answer_id: str
    created: int
    """Unix seconds."""
    model: str
    with_logprobs: bool
    alternatives: int
    """Most likely tokens beside each token, when log-probabilities are shown."""
    with_token_ids: bool
    with_stream_usage: bool
    with_details: bool

    def fields(self, kind: str) -> Json:
        """The beginning of every object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        """One event of a stream. Where usage comes last, every other chunk says null."""
        chunk = {**self.fields(kind), "choices": choices}
        if self.with_stream_usage:
            chunk["usage"] = None
        return chunk

    def usage(self, usage: Usage) -> Json:
        """The fields of an object that bears usage."""
        shown: Json = {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            }
        }
        if self.with_details:
            shown["pageferry"] = {
                "transferred_bytes": usage.transferred_bytes,
                "repaired": usage.repaired,
            }
        return shown


@dataclass
class WholeChoice:
    """A choice that is added up from its deltas."""

    index: int
    parts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta."""
        self.parts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish = delta.finish

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.parts)


class Answers(Protocol):
    """JSON of one endpoint."""

    def opening(self, choices: int) -> list[Json]:
        """Chunks before the first delta."""

    def delta(self, delta: ChoiceDelta) -> list[Json]:
        """Chunks of one delta; the last delta of a choice includes its finish reason."""

    def closing(self, usage: Usage) -> list[Json]:
        """Chunks after the last delta: usage where the client asked for it."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        """The answer of a request that does not stream."""


@dataclass(frozen=True)
class PromptIds:
    """Prompts of a request as they were tokenized, for clients that ask to see them."""

    prompts: Sequence[TokenIds]
    n: int

    def of_choice(self, index: int) -> list[int]:
        """Ids of the prompt that choice ``index`` continues."""
        ids: list[int] = self.prompts[index // self.n].tolist()
        return ids
