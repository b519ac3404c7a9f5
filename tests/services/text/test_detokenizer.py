"""Text made token by token is the text of all tokens, and nothing waits longer than it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.text.detokenizer import Detokenizer, decode
from services.text.vocabulary import UnsupportedTokenizer, Vocabulary
from tests.support.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, token_id

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
BYTE_LEVEL_VOCABULARY = Vocabulary(BYTE_LEVEL)
BYTE_FALLBACK_VOCABULARY = Vocabulary(BYTE_FALLBACK)


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


def bytes_of(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.piece(i) for i in ids if not vocabulary.is_special(i))


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60))
def test_byte_level_deltas_add_up_to_the_library_decode(ids: list[int]) -> None:
    joined = "".join(deltas(Detokenizer.of_text(BYTE_LEVEL_VOCABULARY), ids))
    assert joined == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert joined == decode(BYTE_LEVEL_VOCABULARY, ids)


@given(st.text(max_size=40))
def test_byte_level_text_comes_back(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    parts = deltas(Detokenizer.of_text(BYTE_LEVEL_VOCABULARY), ids)
    assert "".join(parts) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    if "<" not in text:
        assert "".join(parts) == text


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=60))
def test_byte_fallback_deltas_add_up_to_the_bytes(ids: list[int]) -> None:
    joined = "".join(deltas(Detokenizer.of_continuation(BYTE_FALLBACK_VOCABULARY), ids))
    assert joined == bytes_of(BYTE_FALLBACK_VOCABULARY, ids).decode(errors="replace")
    alone = decode(BYTE_FALLBACK_VOCABULARY, ids)
    assert alone == joined.removeprefix(" ")
    library = BYTE_FALLBACK.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in library:
        assert alone == library


@given(st.text(max_size=40))
def test_byte_fallback_text_comes_back(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False).ids
    library = BYTE_FALLBACK.decode(ids, skip_special_tokens=True)
    assert "".join(deltas(Detokenizer.of_text(BYTE_FALLBACK_VOCABULARY), ids)) == library


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize(
    "text", ["\U0001f600", "\U0001f469\u200d\U0001f680", "\ud55c\uae00", "e\u0301"]
)
def test_a_character_appears_with_its_last_byte_and_never_before(
    tokenizer: Tokenizer, text: str
) -> None:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer.of_text(vocabulary)
    seen = ""
    for count, id_ in enumerate(ids, start=1):
        seen += detokenizer.push(id_)
        known = bytes_of(vocabulary, ids[:count]).decode(errors="ignore").removeprefix(" ")
        assert seen == known
    assert seen + detokenizer.flush() == text


def test_a_character_cut_short_is_replaced_once_and_only_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("a\U0001f600", add_special_tokens=False).ids[:-1]
    assert deltas(Detokenizer.of_text(BYTE_LEVEL_VOCABULARY), ids)[-1] == "\ufffd"
    assert "".join(deltas(Detokenizer.of_text(BYTE_LEVEL_VOCABULARY), ids)) == "a\ufffd"


def test_invalid_bytes_do_not_hold_back_the_text_behind_them() -> None:
    ids = [token_id(BYTE_FALLBACK, "<0xF0>")] * 500 + [token_id(BYTE_FALLBACK, "h")]
    detokenizer = Detokenizer.of_text(BYTE_FALLBACK_VOCABULARY)
    parts = [detokenizer.push(id_) for id_ in ids]
    assert parts[1:-1] == ["\ufffd"] * 499
    assert parts[-1] == "\ufffdh"


def test_a_leading_space_belongs_to_a_continuation_only() -> None:
    ids = [token_id(BYTE_FALLBACK, "\u2581the")]
    assert "".join(deltas(Detokenizer.of_text(BYTE_FALLBACK_VOCABULARY), ids)) == "the"
    assert "".join(deltas(Detokenizer.of_continuation(BYTE_FALLBACK_VOCABULARY), ids)) == " the"


@given(st.lists(st.sampled_from(["\u2581", "\u2581a", "b", "\u2581c\u2581d"]), max_size=6))
def test_metaspace_decoder(tokens: list[str]) -> None:
    names = ["\u2581", "\u2581a", "b", "\u2581c\u2581d"]
    tokenizer = Tokenizer(
        models.WordLevel({name: rank for rank, name in enumerate(names)}, unk_token="b")
    )
    tokenizer.decoder = decoders.Metaspace()
    ids = [names.index(token) for token in tokens]
    joined = "".join(deltas(Detokenizer.of_text(Vocabulary(tokenizer)), ids))
    assert joined == tokenizer.decode(ids)


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert decode(BYTE_LEVEL_VOCABULARY, [10**6, token_id(BYTE_LEVEL, "a")]) == "a"


def test_byte_fallback_before_byte_level_is_byte_level_unless_it_has_something_to_do() -> None:
    """transformers 5.17 writes both for byte-level GGUF files."""
    both = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("\u2581", " "),
            decoders.ByteLevel(),
        ]
    )
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = both
    vocabulary = Vocabulary(tokenizer)
    for id_ in range(tokenizer.get_vocab_size()):
        assert vocabulary.piece(id_) == BYTE_LEVEL_VOCABULARY.piece(id_)
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = both
    with pytest.raises(UnsupportedTokenizer, match="expected"):
        Vocabulary(tokenizer)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip("x", 1, 0)])
def test_an_unknown_decoder_is_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedTokenizer, match="expected"):
        Vocabulary(tokenizer)
