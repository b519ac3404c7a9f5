"""Write what a front end needs of a model: tokenizer.json, chat template, generation facts.

Run as ``python -m worker.model.export_tokenizer MODEL_PATH OUT_DIR`` in a short-lived process:
transformers' AutoTokenizer reads every kind of tokenizer (GGUF, sentencepiece, slow ones) but loads
torch, which a front end must not. Writes

    tokenizer.json        the fast tokenizer, post-processor and special tokens included
    chat_template.jinja   only if the model has one
    generation.json       eos_token_ids, bos_token_id, add_bos, max_position_tokens, vocab_size,
                          model_name, special_tokens (name -> text, for templates)

Exit code 1 with one line on standard error when the model has no usable tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers

from worker.model.errors import ModelLoadError
from worker.model.families import describe
from worker.model.gguf_model import configuration
from worker.model.loader import eos_token_ids, quiet_transformers
from worker.model.source import ModelSource, locate

USAGE = "usage: python -m worker.model.export_tokenizer MODEL_PATH OUT_DIR"
PROBE = "a"
"""Encoded to see what the tokenizer puts before a plain prompt."""


def export_tokenizer(model: Path, directory: Path) -> None:
    """Write the files to ``directory``, which is made if needed.

    Raises:
        ModelLoadError: no such model, unknown family, or no tokenizer that the tokenizers library
            can run.
    """
    source = locate(model)
    try:
        with quiet_transformers():
            if source.gguf is not None:
                config = configuration(source.gguf, source.path)
            else:
                config = transformers.AutoConfig.from_pretrained(**source.arguments())
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source.arguments())
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise ModelLoadError(f"{model}: its tokenizer could not be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(
            f"{model}: {type(tokenizer).__name__} has no fast form; add a tokenizer.json to the "
            "model"
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    template = chat_template(tokenizer.chat_template)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    facts = generation_facts(source, tokenizer, config)
    (directory / "generation.json").write_text(
        json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def chat_template(template: str | dict[str, str] | None) -> str | None:
    """The one template of a model, or the default one of several."""
    if isinstance(template, dict):
        return template.get("default")
    return template


def generation_facts(source: ModelSource, tokenizer: Any, config: Any) -> dict[str, Any]:
    """Contents of generation.json."""
    described = describe(config.to_dict())
    ids = set(eos_token_ids(config, _generation_config(source)))
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    bos = tokenizer.bos_token_id
    name = source.path.stem if source.gguf is not None else source.path.resolve().name
    return {
        "eos_token_ids": sorted(ids),
        "bos_token_id": bos,
        "add_bos": bos is not None and tokenizer(PROBE)["input_ids"][:1] == [bos],
        "max_position_tokens": described.max_position_tokens,
        "vocab_size": described.vocab_size,
        "model_name": name,
        "special_tokens": {
            key: str(text)
            for key, text in tokenizer.special_tokens_map.items()
            if isinstance(text, str)
        },
    }


def _generation_config(source: ModelSource) -> Any:
    """The model's generation_config.json, if it has one."""
    if source.gguf is not None or not (source.path / "generation_config.json").is_file():
        return None
    return transformers.GenerationConfig.from_pretrained(str(source.path), local_files_only=True)


def main(arguments: list[str]) -> int:
    """Exit code of the command."""
    if len(arguments) != 2:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        export_tokenizer(Path(arguments[0]), Path(arguments[1]))
    except ModelLoadError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
