"""The bytes that each token id stands for.

Detokenising is concatenating these bytes and reading them as UTF-8, so that text can be produced
token by token without ever decoding anything twice. The rule that turns a token into bytes comes
from the ``decoder`` of a ``tokenizer.json``; byte-level decoders (GPT-2, Llama 3, Qwen, SmolLM) and
byte-fallback ones (SentencePiece: Llama 2, Mistral, Gemma) are understood, any other is refused
when the tokenizer is loaded and never guessed at.

Where a byte-fallback run holds invalid UTF-8, ``tokenizers`` replaces the whole run; here only the
invalid bytes are replaced, because the valid characters before them have been streamed already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer as RawTokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = " "
_MARK: Final = "\u2581"
"""SentencePiece's space."""


class UnsupportedTokenizer(ValueError):
    """A tokenizer.json whose decoder is none of those that :class:`Vocabulary` understands."""


@dataclass(frozen=True)
class _Rule:
    """How one token becomes bytes, and what happens at the very start of a text."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes]
    """For the first token of a text."""
    strip_spaces: int
    """Spaces taken off the start of a text, at most."""


class Vocabulary:
    """Bytes of token ids, made on first use and kept. Reading is safe from any thread."""

    def __init__(self, raw: RawTokenizer) -> None:
        spec: dict[str, Any] = json.loads(raw.to_str())
        self._raw = raw
        tokens = raw.get_vocab(with_added_tokens=True)
        self._rule = _rule(spec.get("decoder"), tokens)
        added = raw.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._ids = frozenset(tokens.values())

    @property
    def strip_spaces(self) -> int:
        """Spaces that the decoder takes off the start of a text, at most."""
        return self._rule.strip_spaces

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which never shows in text."""
        return token_id in self._special

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token inside a text; of a control token its name; empty for an id without a
        token.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._convert(token_id, self._rule.piece)
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text, before :attr:`strip_spaces` applies."""
        return self._convert(token_id, self._rule.first_piece)

    def _convert(self, token_id: int, rule: Callable[[str], bytes]) -> bytes:
        token = self._raw.id_to_token(token_id) if token_id in self._ids else None
        if token is None:
            return b""
        return token.encode() if token_id in self._special else rule(token)


def _rule(decoder: Mapping[str, Any] | None, tokens: Iterable[str]) -> _Rule:
    """Rule of a decoder specification. Raises UnsupportedTokenizer."""
    steps = list(_steps(decoder))
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds and (
        set(kinds) <= {"ByteLevel", "Fuse"} or _is_byte_level_after_all(kinds, tokens)
    ):
        return _Rule(_byte_level, _byte_level, 0)
    if not steps or not set(kinds) <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise UnsupportedTokenizer(
            "tokenizer decoder: expected ByteLevel, or a sequence of Replace, Metaspace,"
            f" ByteFallback, Fuse and Strip, got {' + '.join(kinds) or 'none'}; export the"
            " tokenizer in such a form"
        )
    replaced: list[tuple[str, str]] = []
    dropped = ""
    strip_spaces = 0
    for step in steps:
        match step["type"]:
            case "Replace":
                replaced.append(_replacement(step))
            case "Metaspace":
                mark = str(step.get("replacement", _MARK))
                replaced.append((mark, _SPACE))
                if step.get("prepend_scheme", "always") != "never":
                    dropped = mark
            case "Strip":
                strip_spaces += _stripped_spaces(step)
            case _:
                pass
    return _fallback_rule(replaced, dropped, strip_spaces, has_bytes="ByteFallback" in kinds)


def _is_byte_level_after_all(kinds: Sequence[str], tokens: Iterable[str]) -> bool:
    """Whether the steps of a byte-fallback decoder before the ByteLevel one have nothing to do.

    Some releases of transformers (5.17) write both for byte-level GGUF files.
    """
    if kinds[-1] != "ByteLevel" or not set(kinds) <= {
        "ByteLevel",
        "ByteFallback",
        "Fuse",
        "Replace",
    }:
        return False
    return not any(_MARK in token or _BYTE_TOKEN.fullmatch(token) for token in tokens)


def _steps(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Decoders of a possibly nested sequence, in order."""
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for inner in decoder["decoders"]:
        yield from _steps(inner)


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step.get("pattern", {})
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise UnsupportedTokenizer(
            f"tokenizer decoder: expected Replace of a string, got {pattern!r}"
        )
    return str(pattern["String"]), str(step["content"])


def _stripped_spaces(step: Mapping[str, Any]) -> int:
    if step.get("content") != _SPACE or step.get("stop"):
        raise UnsupportedTokenizer(
            f"tokenizer decoder: expected Strip of spaces at the start only, got {dict(step)!r}"
        )
    return int(step.get("start", 0))


def _fallback_rule(
    replaced: list[tuple[str, str]], dropped: str, strip_spaces: int, *, has_bytes: bool
) -> _Rule:
    def piece(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes.fromhex(byte.group(1))
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    def first_piece(token: str) -> bytes:
        return piece(token.replace(dropped, "") if dropped else token)

    return _Rule(piece, first_piece, strip_spaces)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's reversible map between bytes and printable characters, from character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


BYTE_LEVEL_ALPHABET: Final = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_LEVEL_ALPHABET[character] for character in token)
    except KeyError:  # an added token, written as plain text
        return token.encode()
