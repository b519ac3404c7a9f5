"""Tokenizers small enough to make in a test, of both kinds that models use."""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
ROLE: Final = "<|role|>"

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|role|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's scheme: every byte has a token, some words and parts of characters too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: rank for rank, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in ("the", "\u0120the", "\u0120stop", "llo", "\u00f0\u0141\u013a", "\u00e2\u0122"):
        left = word[0]
        for character in word[1:]:
            if (left, character) not in merges:
                merges.append((left, character))
            left += character
            vocabulary.setdefault(left, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's scheme: some characters have tokens, all others are spelled in bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    pieces += ["\u00e9", "\u4f60", "\u2581t", "\u2581th", "\u2581the", "he"]
    vocabulary = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("h", "e")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_tokens(tokenizer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that is known to exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([BOS, EOS, ROLE])
    tokenizer.add_tokens([AddedToken("<tool \u00e9>", special=False, normalized=False)])
