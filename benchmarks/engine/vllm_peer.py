"""vLLM beside us: ``vllm_program`` in a process of another Python, and what it tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engine.figures import Figures
from benchmarks.engine.shape import ModelShape
from benchmarks.engine.vllm_program import MARK
from benchmarks.engine.workloads import Workloads

VLLM: Final = "vllm"
PROGRAM: Final = Path(__file__).with_name("vllm_program.py")
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine is stepped where times are taken
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not compiled where no CUDA compiler is
}
MOST_OF_MEMORY: Final = 0.85
LAST_WORDS: Final = 3
"""Lines of a process that failed which its reason quotes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """``keys`` of ``workloads`` on a model of that shape, in ``memory_share`` of the device, ended
    after ``limit_s``. ``rest_s`` goes before every sample.
    """

    python: str
    shape: ModelShape
    dtype: str
    workloads: Workloads
    keys: Sequence[str]
    rounds: int
    rest_s: float
    memory_share: float
    limit_s: float


def measure(job: Job, figures: Figures) -> None:
    """Run it to its end; what it does not tell is null, with the reason."""
    with tempfile.TemporaryDirectory(prefix="pageferry-vllm-") as directory:
        model = Path(directory)
        (model / "config.json").write_text(json.dumps(_configuration(job.shape, job.dtype)))
        try:
            ended = _follow(job, _arguments(job, model), figures)
        except OSError as error:
            figures.failed(VLLM, job.keys, error)
            return
    figures.lacks(VLLM, job.keys, ended)


def _configuration(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Of a directory without weights: vLLM makes dummy ones."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _arguments(job: Job, model: Path) -> dict[str, Any]:
    engine = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "max_model_len": 2 * job.workloads.longest,
        "gpu_memory_utilization": round(min(MOST_OF_MEMORY, job.memory_share), 2),
        "enable_prefix_caching": False,
        "max_num_seqs": 256,
    }
    return {
        "engine": engine,
        "vocab": job.shape.vocab,
        "workloads": asdict(job.workloads),
        "keys": [key for key in job.keys if key != "start_s"],
        "rounds": job.rounds,
        "rest_s": job.rest_s,
    }


def _follow(job: Job, arguments: dict[str, Any], figures: Figures) -> str:
    """Pass on what the process tells until it has ended; gives how it ended."""
    began = time.perf_counter()
    process = subprocess.Popen(
        # -P: its folder's names are not to be taken for those of packages.
        [job.python, "-P", str(PROGRAM), json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    )
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(job.limit_s, end)
    timer.start()
    last: deque[str] = deque(maxlen=LAST_WORDS)
    try:
        for message in _messages(process.stdout, last):
            if message.get("fact") == "has_first_token":
                if "start_s" in job.keys:
                    figures.add(VLLM, "start_s", time.perf_counter() - began)
            elif "fact" in message:
                figures.tell(VLLM, **{message["fact"]: message["value"]})
            elif "value" in message:
                figures.add(VLLM, message["key"], message["value"])
            else:
                figures.lacks(VLLM, [message["key"]], message["reason"])
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end()
            process.wait()
    if late.is_set():
        return f"ended after {job.limit_s:.0f} s, the rest of --budget-s"
    return f"{job.python} ended with {status}: {' | '.join(last)}"


def _messages(lines: Iterator[str], last: deque[str]) -> Iterator[dict[str, Any]]:
    """The program's own; everything else is shown, and the end of it kept in ``last``."""
    for line in lines:
        if line.startswith(MARK):
            message: dict[str, Any] = json.loads(line.removeprefix(MARK))
            yield message
        else:
            print(f"{VLLM}: {line.rstrip()}", flush=True)
            if line.strip():
                last.append(line.strip())
