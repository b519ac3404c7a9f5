"""The JSON of /v1/completions: ``text_completion``, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from services.http.answers import AnswerHead, Answers, Json, PromptIds, WholeChoice
from services.http.assembly import ChoiceDelta, OutputToken
from services.http.generation import Usage
from services.http.token_text import completion_logprobs
from services.text.vocabulary import Vocabulary

_KIND: Final = "text_completion"


class CompletionAnswers(Answers):
    """Answers of one completion request."""

    def __init__(self, head: AnswerHead, vocabulary: Vocabulary, prompts: PromptIds) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._prompts = prompts

    @override
    def opening(self, choices: int) -> list[Json]:
        return []

    @override
    def delta(self, delta: ChoiceDelta) -> list[Json]:
        choice = self._choice(delta.choice, delta.text, delta.tokens, delta.finish)
        return [self._head.chunk(_KIND, [choice])]

    @override
    def closing(self, usage: Usage) -> list[Json]:
        if not self._head.with_stream_usage:
            return []
        return [{**self._head.fields(_KIND), "choices": [], **self._head.usage(usage)}]

    @override
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        shown = [
            self._choice(choice.index, choice.text, choice.tokens, choice.finish)
            for choice in choices
        ]
        if self._head.with_token_ids:
            for choice in shown:
                choice["prompt_token_ids"] = self._prompts.of_choice(choice["index"])
        return {**self._head.fields(_KIND), "choices": shown, **self._head.usage(usage)}

    def _choice(
        self, index: int, text: str, tokens: Sequence[OutputToken], finish: str | None
    ) -> Json:
        head = self._head
        choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        if head.with_logprobs:
            choice["logprobs"] = completion_logprobs(self._vocabulary, tokens, head.alternatives)
        if head.with_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice
