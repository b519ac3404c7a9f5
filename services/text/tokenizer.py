"""The served model's tokenizer and chat template, from a directory that needs no transformers to
read.

The directory holds ``tokenizer.json``, ``chat_template.jinja`` where the model has one, and
``generation.json``. Rendering and encoding run in a small pool of threads, and encoding in the only
form of it that lets go of the interpreter's lock: the event loop of the front end never waits for a
long prompt. A text that is certainly too long is not encoded at all. Special tokens
follow transformers: a plain prompt gets what the tokenizer's own post-processor adds, a rendered
chat gets nothing added again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Tokenizer as RawTokenizer

from services.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    InvalidTemplate,
)
from services.text.least_tokens import LeastTokens
from services.text.vocabulary import UnsupportedTokenizer, Vocabulary

TokenIds = npt.NDArray[np.int32]
ResultT = TypeVar("ResultT")


class TokenizerFilesError(ValueError):
    """The directory does not hold a usable tokenizer: files missing, broken or of unknown kinds."""


class TooManyTokens(ValueError):
    """The text has more tokens than the caller can use: at least :attr:`at_least`."""

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"expected at most {limit} tokens, got at least {at_least}; shorten it")
        self.at_least = at_least


class GenerationFacts(BaseModel):
    """``generation.json``: what else the front end knows about the model."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    add_bos: bool = False
    """Plain prompts begin with the bos token, even where the tokenizer.json does not say so."""
    max_position_tokens: int
    vocab_size: int
    model_name: str
    special_tokens: dict[str, str] = {}
    """Text of ``bos_token``, ``eos_token`` and the like, for chat templates; taken from the ids
    where absent.
    """


class Tokenizer:
    """Turns requests into token ids, and knows the bytes of ids. Owns its threads until
    :meth:`close`.
    """

    def __init__(
        self, raw: RawTokenizer, facts: GenerationFacts, template: str | None, *, threads: int = 2
    ) -> None:
        """Raises UnsupportedTokenizer or InvalidTemplate."""
        raw.no_truncation()
        raw.no_padding()
        self.facts = facts
        self.vocabulary = Vocabulary(raw)
        self._raw = raw
        self._least = LeastTokens.of_tokenizer(raw)
        self._template = (
            None if template is None else ChatTemplate(template, self._special_tokens())
        )
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, directory: Path, *, threads: int = 2) -> Tokenizer:
        """Read an exported directory. Raises TokenizerFilesError."""
        template = directory / "chat_template.jinja"
        try:
            facts = GenerationFacts.model_validate_json(
                (directory / "generation.json").read_bytes()
            )
            tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
            source = template.read_text(encoding="utf-8") if template.exists() else None
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise TokenizerFilesError(f"tokenizer files in {directory}: {error}") from error
        try:
            raw = RawTokenizer.from_str(tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerFilesError(f"{directory / 'tokenizer.json'}: {error}") from error
        try:
            return cls(raw, facts, source, threads=threads)
        except (UnsupportedTokenizer, InvalidTemplate) as error:
            raise TokenizerFilesError(f"tokenizer files in {directory}: {error}") from error

    def close(self) -> None:
        """End the threads; calls that still wait for one are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be chatted with."""
        return self._template is not None

    async def encode_prompt(self, text: str, *, limit: int | None = None) -> TokenIds:
        """Ids of a plain prompt. Raises TooManyTokens when ``limit`` is certain to be exceeded."""
        return await self._in_thread(lambda: self._encode_prompt(text, limit))

    async def encode_chat(
        self, conversation: Conversation, *, limit: int | None = None
    ) -> TokenIds:
        """Ids of a rendered conversation. Raises ChatTemplateError, or TooManyTokens when ``limit``
        is certain to be exceeded.

        A message counts as one token at least, so that a template sees no more than ``limit``.
        """
        if limit is not None and len(conversation.messages) > limit:
            raise TooManyTokens(len(conversation.messages), limit)
        return await self._in_thread(lambda: self._encode_chat(conversation, limit))

    def render_chat(self, conversation: Conversation) -> str:
        """Text of a conversation. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError(
                f"the model {self.facts.model_name} has no chat template; use /v1/completions"
            )
        return self._template.render(conversation)

    def _encode_prompt(self, text: str, limit: int | None) -> TokenIds:
        self._check_length(text, limit)
        # `encode` holds the interpreter's lock for as long as it takes; the batches do not.
        (encoded,) = self._raw.encode_batch_fast([text], add_special_tokens=True)
        ids = encoded.ids
        bos = self.facts.bos_token_id
        if self.facts.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return np.asarray(ids, dtype=np.int32)

    def _encode_chat(self, conversation: Conversation, limit: int | None) -> TokenIds:
        text = self.render_chat(conversation)
        self._check_length(text, limit)
        (encoded,) = self._raw.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int32)

    def _check_length(self, text: str, limit: int | None) -> None:
        least = self._least.of(text)
        if limit is not None and least > limit:
            raise TooManyTokens(least, limit)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _special_tokens(self) -> dict[str, str]:
        """Names that chat templates use, with their text."""
        found: dict[str, str] = {}
        ids = {
            "bos_token": self.facts.bos_token_id,
            "eos_token": next(iter(self.facts.eos_token_ids), None),
        }
        for name, token_id in ids.items():
            token = None if token_id is None else self._raw.id_to_token(token_id)
            if token is not None:
                found[name] = token
        return {**found, **self.facts.special_tokens}
