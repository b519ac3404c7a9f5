"""How many tokens a text has at least, known from its length alone.

A token of the vocabulary covers no more characters than it is long, so a text of ``n`` characters
has at least ``n / longest`` tokens. This holds only where nothing between the text and its tokens
drops or joins characters. Invariant: a bound that is not certain is 0, never a guess. Kinds of
normalizers, pre-tokenizers and models that are not named here therefore have no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer as RawTokenizer

from services.text.vocabulary import BYTE_LEVEL_ALPHABET

_NFC_JOINS: Final = 4
"""Characters that canonical composition makes one of, at most. It leaves ASCII as it is."""


@dataclass(frozen=True)
class LeastTokens:
    """Characters that one token covers at most; None where there is no such number."""

    of_ascii: int | None
    of_other: int | None
    dropped: str = ""
    """ASCII characters without a token."""

    @classmethod
    def of_tokenizer(cls, raw: RawTokenizer) -> LeastTokens:
        """Read the rules and the vocabulary of ``raw``; takes time in proportion to it."""
        spec: dict[str, Any] = json.loads(raw.to_str())
        normalizers = list(_steps(spec.get("normalizer"), "normalizers"))
        pre_tokenizers = list(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
        dropped = _dropped(spec["model"], pre_tokenizers)
        if (
            dropped is None
            or (dropped and normalizers)
            or not all(map(_keeps_length, normalizers))
            or not all(map(_keeps_text, pre_tokenizers))
            or any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        ):
            return cls(None, None)
        # A character of a byte-level token is one byte, so at most one character of the text.
        longest = max(map(len, raw.get_vocab(with_added_tokens=True)))
        composes = any(step["type"] == "NFC" for step in normalizers)
        return cls(longest, longest * _NFC_JOINS if composes else longest, dropped)

    def of(self, text: str) -> int:
        """Tokens of ``text``, at least; takes next to no time."""
        covered = self.of_ascii if text.isascii() else self.of_other
        if covered is None:
            return 0
        return -(-(len(text) - sum(map(text.count, self.dropped))) // covered)


def _steps(spec: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    """Parts of a possibly nested sequence, in order."""
    if spec is None:
        return
    if spec["type"] != "Sequence":
        yield spec
        return
    for part in spec[inner]:
        yield from _steps(part, inner)


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer leaves at least as many characters; of NFC up to its factor."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    return step["type"] in {"NFC", "Prepend"}


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts the text without dropping any of it."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in {"ByteLevel", "Digits", "Metaspace"}


def _dropped(model: Mapping[str, Any], pre_tokenizers: Iterable[Mapping[str, Any]]) -> str | None:
    """ASCII characters that are dropped as unknown, or joined with others to one unknown token;
    None where this can happen to other characters too.
    """
    if model["type"] != "BPE":
        return None
    tokens = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        missing = [byte for letter, byte in BYTE_LEVEL_ALPHABET.items() if letter not in tokens]
        # Bytes that begin a character are followed by others: one of them is enough.
        if any(0x80 <= byte < 0xC0 for byte in missing):
            return None
        return "".join(chr(byte) for byte in missing if byte < 0x80)
    has_bytes = all(f"<0x{byte:02X}>" in tokens for byte in range(256))
    return "" if has_bytes and model.get("byte_fallback") else None
