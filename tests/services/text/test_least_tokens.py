"""The bound on the number of tokens is never above it, and 0 where it cannot be known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.text.least_tokens import LeastTokens
from tests.support.tiny_tokenizers import (
    BOS,
    EOS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
)


def composing_tokenizer() -> Tokenizer:
    raw = byte_level_tokenizer()
    raw.normalizer = normalizers.NFC()
    return raw


def tokenizer_without(*letters: str) -> Tokenizer:
    """Byte level, with some of the 256 tokens missing: SmolLM's has none for some controls."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters))
    vocab = {letter: rank for rank, letter in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return raw


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "NFC": composing_tokenizer(),
    "controls missing": tokenizer_without("\u0104", "\u00f1"),
}
BOUNDS = {kind: LeastTokens.of_tokenizer(raw) for kind, raw in TOKENIZERS.items()}

PIECES = st.sampled_from(
    [
        BOS,
        EOS,
        "<tool \u00e9>",
        " the",
        " stop",
        "llo",
        "\n",
        "\x04",
        "\u4f60",
        "\U0001f44b",
        "\U00040000",
        # Sequences that NFC joins, three and four characters to one.
        "\u1112\u1161\u11ab",
        "\u03b1\u0313\u0300\u0345",
        "\u1fbe\u0308\u0301",
        "e\u0301",
    ]
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join))
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    least = BOUNDS[kind].of(text)
    assert least <= len(TOKENIZERS[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_has_many(kind: str) -> None:
    longest = max(map(len, TOKENIZERS[kind].get_vocab()))
    assert BOUNDS[kind].of("x" * 1000) == -(-1000 // longest)
    assert BOUNDS[kind].of("") == 0


def stripping() -> Tokenizer:
    raw = byte_level_tokenizer()
    raw.add_tokens([AddedToken("<mask>", lstrip=True)])
    return raw


def dropping() -> Tokenizer:
    raw = byte_level_tokenizer()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return raw


def shortening() -> Tokenizer:
    raw = byte_level_tokenizer()
    raw.normalizer = normalizers.Replace("aa", "a")
    return raw


def unknown_normalizer() -> Tokenizer:
    raw = byte_level_tokenizer()
    raw.normalizer = normalizers.NFKC()
    return raw


def without_a_continuation_byte() -> Tokenizer:
    return tokenizer_without("\u0122")  # byte 0x80


def of_another_model() -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))


@pytest.mark.parametrize(
    "make",
    [
        stripping,
        dropping,
        shortening,
        unknown_normalizer,
        without_a_continuation_byte,
        of_another_model,
    ],
)
def test_where_characters_may_go_missing_there_is_no_bound(make: object) -> None:
    assert callable(make)
    assert LeastTokens.of_tokenizer(make()).of("a" * 1000) == 0
