"""The JSON of /v1/chat/completions: ``chat.completion`` and ``chat.completion.chunk``.

Streams carry deltas only: one chunk with the role for each choice, chunks with content, one with
the finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from services.http.answers import AnswerHead, Answers, Json, PromptIds, WholeChoice
from services.http.assembly import ChoiceDelta, OutputToken
from services.http.generation import Usage
from services.http.token_text import chat_logprobs
from services.text.vocabulary import Vocabulary

_CHUNK: Final = "chat.completion.chunk"


class ChatAnswers(Answers):
    """Answers of one chat request."""

    def __init__(self, head: AnswerHead, vocabulary: Vocabulary, prompts: PromptIds) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._prompts = prompts

    @override
    def opening(self, choices: int) -> list[Json]:
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, (), None)
            for index in range(choices)
        ]

    @override
    def delta(self, delta: ChoiceDelta) -> list[Json]:
        chunks: list[Json] = []
        shows_tokens = delta.tokens and (self._head.with_logprobs or self._head.with_token_ids)
        if delta.text or shows_tokens:
            chunks.append(self._chunk(delta.choice, {"content": delta.text}, delta.tokens, None))
        if delta.finish is not None:
            chunks.append(self._chunk(delta.choice, {}, (), delta.finish))
        return chunks

    @override
    def closing(self, usage: Usage) -> list[Json]:
        if not self._head.with_stream_usage:
            return []
        return [{**self._head.fields(_CHUNK), "choices": [], **self._head.usage(usage)}]

    @override
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        answer: Json = {
            **self._head.fields("chat.completion"),
            "choices": [self._whole_choice(choice) for choice in choices],
            **self._head.usage(usage),
        }
        if self._head.with_token_ids:
            answer["prompt_token_ids"] = self._prompts.of_choice(0)
        return answer

    def _whole_choice(self, choice: WholeChoice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            **self._token_fields(choice.tokens),
            "finish_reason": choice.finish,
        }

    def _chunk(
        self, index: int, delta: Json, tokens: Sequence[OutputToken], finish: str | None
    ) -> Json:
        fields = self._token_fields(tokens) if tokens else {"logprobs": None}
        choice = {"index": index, "delta": delta, **fields, "finish_reason": finish}
        return self._head.chunk(_CHUNK, [choice])

    def _token_fields(self, tokens: Sequence[OutputToken]) -> Json:
        head = self._head
        fields: Json = {"logprobs": None}
        if head.with_logprobs:
            fields["logprobs"] = chat_logprobs(self._vocabulary, tokens, head.alternatives)
        if head.with_token_ids:
            fields["token_ids"] = [token.token_id for token in tokens]
        return fields
