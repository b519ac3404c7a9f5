"""How single tokens appear in log-probabilities, in the two shapes that OpenAI has.

A token that holds only part of a character has no text; it is written with escaped bytes
(``\\xe2\\x80``), which no client can mistake for U+FFFD and which keeps the keys of alternatives
apart. Its exact bytes stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.http.assembly import OutputToken
from services.text.vocabulary import Vocabulary

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[OutputToken], alternatives: int
) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""
    return {
        "content": [
            {
                **_entry(vocabulary, token.token_id, _own(token)),
                "top_logprobs": [
                    _entry(vocabulary, token_id, logprob)
                    for token_id, logprob in _top(token, alternatives)
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[OutputToken], alternatives: int
) -> dict[str, Any]:
    """``logprobs`` of a completion choice. The token itself is always among the alternatives."""
    top = []
    for token in tokens:
        shown = {
            _key(vocabulary, each): _finite(logprob) for each, logprob in _top(token, alternatives)
        }
        shown.setdefault(_key(vocabulary, token.token_id), _finite(_own(token)))
        top.append(shown)
    return {
        "tokens": [_key(vocabulary, token.token_id) for token in tokens],
        "token_logprobs": [_finite(_own(token)) for token in tokens],
        "top_logprobs": top,
        "text_offset": [token.text_offset for token in tokens],
    }


def _own(token: OutputToken) -> float:
    return LOWEST if token.logprob is None else token.logprob.logprob


def _top(token: OutputToken, alternatives: int) -> Sequence[tuple[int, float]]:
    return () if token.logprob is None else token.logprob.top[:alternatives]


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    piece = vocabulary.piece(token_id)
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


def _text(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in piece)


def _key(vocabulary: Vocabulary, token_id: int) -> str:
    piece = vocabulary.piece(token_id)
    text = _text(piece)
    return f"bytes:{text}" if text.encode() != piece else text
