"""Text of one choice, token by token.

Invariant: the concatenation of everything returned is the UTF-8 reading of the tokens' bytes,
however the tokens were split over calls. Bytes that do not end a character yet are held until they
do or until ``flush``; bytes that can never become a character are replaced by U+FFFD at once, so
that no sequence of tokens can stall the text behind it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final

from services.text.vocabulary import Vocabulary

_SPACE: Final = b" "


class Detokenizer:
    """Incremental detokenizer. Control tokens never show. Costs time linear in the text."""

    def __init__(self, vocabulary: Vocabulary, *, strip_spaces: int, is_first: bool) -> None:
        self._vocabulary = vocabulary
        self._strip_spaces = strip_spaces
        self._is_first = is_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of_text(cls, vocabulary: Vocabulary) -> Detokenizer:
        """For tokens that are a text of their own, such as a chat answer: equal to decoding them
        alone.
        """
        return cls(vocabulary, strip_spaces=vocabulary.strip_spaces, is_first=True)

    @classmethod
    def of_continuation(cls, vocabulary: Vocabulary) -> Detokenizer:
        """For tokens that continue a prompt: a leading space is part of the text."""
        return cls(vocabulary, strip_spaces=0, is_first=False)

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is incomplete."""
        if self._vocabulary.is_special(token_id):
            return ""
        if self._is_first:
            piece = self._vocabulary.first_piece(token_id)
            self._is_first = False
        else:
            piece = self._vocabulary.piece(token_id)
        while self._strip_spaces and piece:
            if not piece.startswith(_SPACE):
                self._strip_spaces = 0
                break
            piece = piece[1:]
            self._strip_spaces -= 1
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What the end of the text completes: U+FFFD for a character cut short, else nothing."""
        return self._decoder.decode(b"", final=True)


def decode(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Text of tokens that are all known."""
    detokenizer = Detokenizer.of_text(vocabulary)
    parts = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join((*parts, detokenizer.flush()))
