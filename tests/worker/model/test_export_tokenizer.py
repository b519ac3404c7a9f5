"""The exported tokenizer gives a front end the ids that transformers gives, templates included."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.text.chat_template import Conversation
from services.text.tokenizer import Tokenizer
from worker.model.errors import ModelLoadError
from worker.model.export_tokenizer import chat_template, export_tokenizer, main
from worker.model.source import locate

TinyModel = Callable[[str], Path]

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "line\n\n\tbreaks\r\n",
    "naïve café Ωμέγα 你好 こんにちは 🙂👩‍👩‍👧 \u0301\u202e",
    "1234567890 3.14159 0x7f",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}\n",
    "<|im_start|>user\nspecials in text<|im_end|>\n<s></s><|user|>",
    "\x00\x1f\x7f\ufeff\ufffd",
    "word " * 300,
)
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "  Capital of Île-de-France? 🙂 "},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "{{ 7 * 7 }} <|im_end|>"},
    ],
)


async def compare(model: Path, directory: Path) -> None:
    """Ids of every text and conversation, through both ways."""
    expected: Any = transformers.AutoTokenizer.from_pretrained(**locate(model).arguments())
    exported = Tokenizer.load(directory)
    try:
        for text in TEXTS:
            found = await exported.encode_prompt(text)
            assert found.tolist() == expected(text)["input_ids"], repr(text)
        for messages in CONVERSATIONS:
            for prompt in (True, False):
                found = await exported.encode_chat(
                    Conversation(messages=messages, add_generation_prompt=prompt)
                )
                ids = expected.apply_chat_template(
                    messages, add_generation_prompt=prompt, return_dict=True
                )["input_ids"]
                assert found.tolist() == ids
    finally:
        exported.close()


async def test_ids_of_a_directory(tiny_model: TinyModel, tmp_path: Path) -> None:
    export_tokenizer(tiny_model("llama"), tmp_path)
    await compare(tiny_model("llama"), tmp_path)


async def test_ids_of_the_real_model(real_model: Path, tmp_path: Path) -> None:
    export_tokenizer(real_model, tmp_path)
    await compare(real_model, tmp_path)
    facts = json.loads((tmp_path / "generation.json").read_text())
    assert facts["eos_token_ids"] == [2]
    assert facts["vocab_size"] == 49152
    assert facts["max_position_tokens"] == 8192


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_facts(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    assert main([str(tiny_model(family)), str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "generation.json").read_text())
    assert facts == {
        "eos_token_ids": [257],
        "bos_token_id": 256,
        "add_bos": False,
        "max_position_tokens": 512,
        "vocab_size": 288,
        "model_name": family,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
    }


def test_a_bos_that_the_tokenizer_adds(tiny_model: TinyModel, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    source = tiny_model("llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    model = tmp_path / "model"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(model)
    export_tokenizer(model, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "generation.json").read_text())
    assert facts["add_bos"] is True


def test_one_of_several_templates() -> None:
    assert chat_template(None) is None
    assert chat_template("a") == "a"
    assert chat_template({"tool_use": "t", "default": "d"}) == "d"
    assert chat_template({"tool_use": "t"}) is None


def test_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="found nothing"):
        export_tokenizer(tmp_path / "nowhere", tmp_path / "out")
    command = [sys.executable, "-m", "worker.model.export_tokenizer", str(tmp_path / "x"), "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "found nothing" in done.stderr
    assert main([]) == 2
