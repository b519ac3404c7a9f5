"""transformers beside us, in this process: a model of the same shape through its own ``generate``,
``forward`` and ``generate_batch``.

Batch 1 decodes with a dynamic cache as ``generate`` does by itself, and with a static one, which
``generate`` compiles on a GPU. Attention is torch's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import transformers

from benchmarks.engine.contest import Entrant, Sample
from benchmarks.engine.shape import ModelShape, make_module
from benchmarks.engine.workloads import Load, Workloads
from benchmarks.stamps import Stamps
from benchmarks.timing import once

TRANSFORMERS: Final = "transformers"
BLOCK: Final = 256
"""Tokens of a block of its continuous batching."""
SETTLED: Final = 16
"""Tokens after which a compiled step has its graphs again: a call makes a cache of its own."""


class TransformersPeer:
    """One model. Runs outside of inference mode, as a user's would."""

    def __init__(
        self, shape: ModelShape, device: torch.device, dtype: torch.dtype, asked: Workloads
    ) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._asked = asked
        self._random = torch.Generator().manual_seed(0)
        with _as_users_run():
            model: Any = make_module(shape, device, dtype, "sdpa")
        self._model = model
        self._model.config.eos_token_id = None
        self._model.generation_config.eos_token_id = None

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader must know of the figures."""
        return {
            "version": transformers.__version__,
            "attention": self._model.config._attn_implementation,
        }

    def entrants(self) -> dict[str, Entrant]:
        """By key."""
        ready: dict[str, Callable[[], Any]] = {
            "decode_b1_tok_s": lambda: self._decode(None),
            "decode_b1_compiled_tok_s": lambda: self._decode("static"),
            "prefill_8k_ms": self._prefill,
            "b64_4k_step_ms": self._wide,
        }
        for key, load in self._asked.loads.items():
            ready[key] = partial(self._together, load)
        return {key: Entrant(TRANSFORMERS, key, start) for key, start in ready.items()}

    @contextmanager
    def _decode(self, cache: str | None) -> Iterator[Sample]:
        load = self._asked.decode

        def tok_s() -> float:
            stamps = Stamps()
            ids = torch.tensor([self._prompt(load.prompt)], device=self._device)
            with _as_users_run():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=load.output,
                    pad_token_id=0,
                    cache_implementation=cache,
                    streamer=stamps,
                )
            times = stamps.times
            if len(times) != load.output:
                raise RuntimeError(f"expected {load.output} tokens, got {len(times)}")
            times = times[SETTLED if len(times) > 2 * SETTLED else 0 :]
            return (len(times) - 1) / (times[-1] - times[0])

        tok_s()
        yield tok_s

    @contextmanager
    def _prefill(self) -> Iterator[Sample]:
        ids = torch.tensor([self._prompt(self._asked.prefill_tokens)], device=self._device)

        def work() -> None:
            with _as_users_run():
                self._model(ids, use_cache=True, logits_to_keep=1)

        work()
        yield lambda: once(work, self._device) * 1e3
        _release(self._device)

    @contextmanager
    def _wide(self) -> Iterator[Sample]:
        load = self._asked.wide
        caches = [self._filled(load)]
        ids = torch.ones((load.requests, 1), dtype=torch.long, device=self._device)

        def work() -> None:
            with _as_users_run():
                self._model(ids, past_key_values=caches[0], use_cache=True)

        work()
        yield lambda: once(work, self._device) * 1e3
        caches.clear()  # the sample outlives this
        _release(self._device)

    def _filled(self, load: Load) -> Any:
        """A dynamic cache of random keys and values."""
        shape = self._shape
        cache = transformers.DynamicCache(config=self._model.config)
        rows = (load.requests, shape.kv_heads, load.prompt, shape.head_dim)
        for layer in range(shape.layers):
            pair = [torch.randn(rows, dtype=self._dtype, device=self._device) for _ in range(2)]
            cache.update(*pair, layer)
        return cache

    @contextmanager
    def _together(self, load: Load) -> Iterator[Sample]:
        """Its continuous batching, from the first request to the last token."""
        few = Load(min(8, load.requests), max(1, load.prompt // 8), 2)
        self._batch_tok_s(few)
        yield lambda: self._batch_tok_s(load)
        _release(self._device)

    def _batch_tok_s(self, load: Load) -> float:
        _release(self._device)  # it takes its share of what is free
        configuration = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=load.output, eos_token_id=-1, pad_token_id=0
        )
        prompts = [self._prompt(load.prompt) for _ in range(load.requests)]
        with _as_users_run():
            outputs = self._model.generate_batch(
                prompts,
                generation_config=configuration,
                continuous_batching_config=self._batching(load),
                progress_bar=False,
            ).values()
        tokens = sum(len(one.generated_tokens) for one in outputs)
        if tokens != load.requests * load.output:
            raise RuntimeError(
                f"expected {load.requests} x {load.output} tokens, got {tokens} of {len(outputs)} "
                f"requests: {[one.error for one in outputs if one.error][:1]}"
            )
        began = min(one.created_time for one in outputs)
        ended = max(one.lifespan[1] for one in outputs)
        return tokens / float(ended - began)

    def _batching(self, load: Load) -> Any:
        """As it comes on a device; on a CPU it would take most of the machine's memory."""
        if self._device.type == "cuda":
            return None
        blocks = 2 * load.requests * (1 + (load.prompt + load.output) // BLOCK)
        return transformers.ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=BLOCK)

    def _prompt(self, length: int) -> list[int]:
        found: list[int] = torch.randint(
            1, self._shape.vocab, (length,), generator=self._random
        ).tolist()
        return found


@contextmanager
def _as_users_run() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
