"""The peer of the serve benchmark: transformers' own ``generate`` on the same model, in a process
of its own.

Reads one JSON line a request on stdin (``{"prompt", "output_tokens"}``), answers one JSON line
with the times of its tokens. The same chat template, dtype, thread count, greedy choice and
number of tokens as the service.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.devices import DTYPES
from benchmarks.stamps import Stamps


def load(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    if path.suffix == ".gguf":
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": path.parent,
            "gguf_file": path.name,
        }
    else:
        where = {"pretrained_model_name_or_path": path}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval()
    return tokenizer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer, model = load(arguments.model, DTYPES[arguments.dtype])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": request["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        stamps = Stamps()
        count = request["output_tokens"]
        with torch.inference_mode():
            model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                streamer=stamps,
            )
        times = [(t - started) * 1e3 for t in stamps.times]
        times[-1:] = [(time.perf_counter() - started) * 1e3]
        prompt_tokens = inputs["input_ids"].shape[1]
        print(json.dumps({"ms": times, "prompt_tokens": prompt_tokens}), flush=True)


if __name__ == "__main__":
    main()
