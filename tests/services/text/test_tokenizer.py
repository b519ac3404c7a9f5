"""Special tokens, files and threads of the tokenizer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from services.text.chat_template import ChatTemplateError, Conversation
from services.text.tokenizer import (
    GenerationFacts,
    Tokenizer,
    TokenizerFilesError,
    TooManyTokens,
)
from tests.support.tiny_tokenizers import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    token_id,
)

CHAT = Conversation(messages=[{"role": "user", "content": "hello"}])


def facts(**changes: object) -> GenerationFacts:
    raw = byte_level_tokenizer()
    values: dict[str, object] = {
        "eos_token_ids": [raw.token_to_id(EOS)],
        "bos_token_id": raw.token_to_id(BOS),
        "max_position_tokens": 128,
        "vocab_size": raw.get_vocab_size(),
        "model_name": "tiny",
    }
    return GenerationFacts.model_validate({**values, **changes})


def export(directory: Path, template: str | None) -> None:
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "generation.json").write_text(facts().model_dump_json())
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


async def test_a_prompt_gets_what_the_post_processor_adds_and_a_chat_does_not() -> None:
    raw = byte_level_tokenizer()
    bos = raw.token_to_id(BOS)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    tokenizer = Tokenizer(raw, facts(add_bos=True), "{{ bos_token }}{{ messages[0].content }}")
    hello = raw.encode("hello", add_special_tokens=False).ids
    assert (await tokenizer.encode_prompt("hello")).tolist() == [bos, *hello]
    assert (await tokenizer.encode_chat(CHAT)).tolist() == [bos, *hello]
    tokenizer.close()


async def test_bos_is_added_where_the_file_does_not_say_so() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), facts(add_bos=True), None)
    bos = tokenizer.facts.bos_token_id
    assert (await tokenizer.encode_prompt("a")).tolist()[0] == bos
    assert (await tokenizer.encode_prompt(f"{BOS}a")).tolist().count(bos or 0) == 1
    tokenizer.close()


async def test_truncation_in_the_file_is_ignored() -> None:
    raw = byte_level_tokenizer()
    raw.enable_truncation(3)
    tokenizer = Tokenizer(raw, facts(), None)
    assert len(await tokenizer.encode_prompt("x" * 100)) == 100
    tokenizer.close()


async def test_loading_a_directory(tmp_path: Path) -> None:
    export(tmp_path, CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)
    ids = (await tokenizer.encode_chat(CHAT)).tolist()
    assert byte_level_tokenizer().decode(ids, skip_special_tokens=False) == (
        f"<|role|>user\nhello{EOS}\n<|role|>assistant\n"
    )
    tokenizer.close()


async def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    export(tmp_path, None)
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        await tokenizer.encode_chat(CHAT)
    tokenizer.close()


@pytest.mark.parametrize("broken", ["tokenizer.json", "generation.json"])
def test_unusable_files_are_named(tmp_path: Path, broken: str) -> None:
    export(tmp_path, None)
    (tmp_path / broken).write_text(json.dumps({"x": 1}))
    with pytest.raises(TokenizerFilesError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    (tmp_path / broken).unlink()
    with pytest.raises(TokenizerFilesError, match=broken):
        Tokenizer.load(tmp_path)


def test_files_of_unknown_kinds_are_named(tmp_path: Path) -> None:
    export(tmp_path, "{% if %}")
    with pytest.raises(TokenizerFilesError, match="chat template"):
        Tokenizer.load(tmp_path)
    export(tmp_path, None)
    (tmp_path / "chat_template.jinja").unlink()
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerFilesError, match="WordPiece"):
        Tokenizer.load(tmp_path)


async def test_encoding_happens_outside_the_event_loop() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), facts(), "{{ messages[0].content }}")
    before = {thread.name for thread in threading.enumerate()}
    await asyncio.gather(*(tokenizer.encode_chat(CHAT) for _ in range(8)))
    after = {thread.name for thread in threading.enumerate()} - before
    assert after
    assert all(name.startswith("tokenizer") for name in after)
    tokenizer.close()


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "the stop",
        f"{BOS}hello{EOS}",
        "<tool \u00e9>\u4f60\U0001f44b\u00e9 e\u0301\x00\r\n",
    ],
)
async def test_ids_are_those_of_encode(make: Callable[[], RawTokenizer], text: str) -> None:
    raw = make()
    raw.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, token_id(raw, EOS))]
    )
    tokenizer = Tokenizer(raw, facts(), "{{ messages[0].content }}")
    said = Conversation(messages=[{"role": "user", "content": text}])
    assert (await tokenizer.encode_prompt(text)).tolist() == raw.encode(text).ids
    assert (await tokenizer.encode_chat(said)).tolist() == (
        raw.encode(text, add_special_tokens=False).ids
    )
    tokenizer.close()


async def test_the_loop_goes_on_while_a_long_prompt_is_encoded() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), facts(), "{{ messages[0].content }}")
    text = "hello the world " * 30_000
    said = Conversation(messages=[{"role": "user", "content": text}])
    loop = asyncio.get_running_loop()
    for work in (tokenizer.encode_prompt(text), tokenizer.encode_chat(said)):
        began = last = loop.time()
        worst = 0.0
        encoding = asyncio.ensure_future(work)
        while not encoding.done():
            await asyncio.wait({encoding}, timeout=0.001)
            now = loop.time()
            worst, last = max(worst, now - last), now
        assert len(encoding.result()) > 300_000
        # Of `encode` it is nearly all.
        assert worst < (last - began) / 2
    tokenizer.close()


async def test_what_cannot_fit_is_not_encoded() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), facts(), "{{ messages[0].content }}")
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    fits, too_long = "x" * longest * 10, "x" * (longest * 10 + 1)
    assert len(await tokenizer.encode_prompt(fits, limit=10)) > 10
    with pytest.raises(TooManyTokens) as caught:
        await tokenizer.encode_prompt(too_long, limit=10)
    assert caught.value.at_least == 11
    with pytest.raises(TooManyTokens):
        await tokenizer.encode_chat(
            Conversation(messages=[{"role": "user", "content": too_long}]), limit=10
        )
    tokenizer.close()


async def test_more_messages_than_tokens_are_not_rendered() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), facts(), "{{ raise_exception('rendered') }}")
    with pytest.raises(TooManyTokens):
        await tokenizer.encode_chat(Conversation(messages=[*CHAT.messages] * 11), limit=10)
    with pytest.raises(ChatTemplateError):
        await tokenizer.encode_chat(Conversation(messages=[*CHAT.messages] * 10), limit=10)
    tokenizer.close()
