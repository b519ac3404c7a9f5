"""Loading a model for inference: files checked, weights in one dtype on one device, facts beside
the module.

The module is transformers' own, in eval mode, with our paged attention. Loading reads local files
only and never runs code that comes with a model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.utils import logging as transformers_logging

from kvcache_core.spec import ElementType, KVCacheLayerSpec
from worker.config import ElementType as ConfiguredType
from worker.model.attention import PAGED
from worker.model.errors import ModelLoadError
from worker.model.families import KNOWN_FAMILIES, ModelFacts, describe
from worker.model.gguf_model import apply_rope_factors, configuration, state_dict
from worker.model.inspection import check_tokens_alone, inspect_family
from worker.model.pageable import SERVED, Configuration
from worker.model.rank_sum import OnlyRank, RankSum
from worker.model.rank_weights import read_safetensors
from worker.model.shard import ShardPlan
from worker.model.source import ModelSource, locate

Progress = Callable[[str], None]

GENERATION_CONFIG: Final = "generation_config.json"

TORCH_TYPES: Final[dict[ElementType, torch.dtype]] = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """One rank's part of a model, ready to run. ``module`` is the transformers causal language
    model, with narrower layers where ranks share them.
    """

    module: Any
    facts: ModelFacts
    """Of this rank's part: its heads alone."""
    whole_facts: ModelFacts
    configuration: Configuration
    """Of the whole model."""
    ranks: RankSum
    shard_plan: ShardPlan
    specs: tuple[KVCacheLayerSpec, ...]
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; may exceed the tokenizer's vocabulary."""
        return self.facts.vocab_size

    @property
    def max_position_tokens(self) -> int:
        """Longest sequence the model was made for."""
        return self.facts.max_position_tokens


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: ConfiguredType = "auto",
    ranks: RankSum = OnlyRank(),  # noqa: B008  # a value
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a Hugging Face directory or a GGUF file, or one rank's part of it.

    Args:
        path: the directory or file.
        device: a torch device.
        dtype: of weights, activations and KV pages. ``auto`` is float32 on CPU, elsewhere the
            checkpoint's type
            (bfloat16 for GGUF).
        ranks: the ranks that share the model, this one among them. Only this one's part is read.
        progress: called with one short sentence at each stage.

    Raises:
        ModelLoadError: nothing there, unknown family, files missing, truncated or incomplete.
    """
    source = locate(path)
    started = time.monotonic()
    progress(f"loading {source.path.name} ({source.weight_bytes / 1e6:.0f} MB)")
    reading = {"attn_implementation": PAGED, "dtype": _load_dtype(source, device, dtype)}
    try:
        with quiet_transformers():
            config = _configuration(source)
            whole = config.to_dict()
            whole_facts = describe(whole)
            known = whole_facts.family in KNOWN_FAMILIES
            if not known:
                whole_facts = inspect_family(config, whole_facts)
            plan = ShardPlan(ranks.shard, whole_facts, config)
            module = _read(source, config, plan, reading, progress)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise ModelLoadError(f"{source.path}: transformers could not load it: {error}") from error
    target = _device(device)
    module = module.to(target).eval().requires_grad_(requires_grad=False)
    if not known:
        check_tokens_alone(module, whole_facts)
    chosen = _element_type(module.dtype)
    facts = plan.facts()
    progress(
        f"loaded {facts.family}: {sum(p.numel() for p in module.parameters()) / 1e6:.0f} M "
        "parameters "
        f"in {chosen.value} on {target}, {time.monotonic() - started:.1f} s"
    )
    return LoadedModel(
        module=module,
        facts=facts,
        whole_facts=whole_facts,
        configuration=whole,
        ranks=ranks,
        shard_plan=plan,
        specs=facts.layer_specs(chosen),
        eos_token_ids=eos_token_ids(module.config, module.generation_config),
        device=target,
        dtype=module.dtype,
    )


def _device(name: str) -> torch.device:
    """The device with its index, as tensors on it report it."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _load_dtype(source: ModelSource, device: str, dtype: ConfiguredType) -> torch.dtype | str:
    if dtype != "auto":
        return TORCH_TYPES[ElementType(dtype)]
    if torch.device(device).type == "cpu":
        return torch.float32
    return torch.bfloat16 if source.gguf is not None else "auto"


def _element_type(dtype: torch.dtype) -> ElementType:
    for element, candidate in TORCH_TYPES.items():
        if candidate == dtype:
            return element
    raise ModelLoadError(
        f"expected weights in float32, bfloat16 or float16, the checkpoint has {dtype}; choose a "
        "dtype"
    )


def _configuration(source: ModelSource) -> Any:
    if source.gguf is not None:
        return configuration(source.gguf, source.path)
    config = transformers.AutoConfig.from_pretrained(**source.arguments())
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"model family {source.model_type!r} is not supported: transformers has no causal "
            f"language model of it; {SERVED}"
        )
    return config


def _read(
    source: ModelSource,
    config: Any,
    plan: ShardPlan,
    reading: dict[str, Any],
    progress: Progress,
) -> Any:
    """The transformers module with all weights of this rank."""
    reading = {**reading, "output_loading_info": True}
    if source.gguf is None and plan.shard.size == 1:
        read = transformers.AutoModelForCausalLM.from_pretrained
        module, report = read(**source.arguments(), **reading)
    else:
        module, report = _read_part(source, config, plan, reading, progress)
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            keys = sorted(map(str, report[kind]))
            raise ModelLoadError(
                f"{source.path}: the checkpoint lacks {len(keys)} weights, such as {keys[0]}"
            )
    return module


def _read_part(
    source: ModelSource,
    config: Any,
    plan: ShardPlan,
    reading: dict[str, Any],
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """From weights that we read ourselves: those of GGUF files, and a rank's part of others."""
    if source.gguf is None:
        weights = read_safetensors(source.shards, plan)
    else:
        weights = state_dict(source.gguf, source.path, config, reading["dtype"], progress, plan)
    own = copy.deepcopy(config)
    for name, value in plan.configuration().items():
        setattr(own, name, value)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module, report = model_class.from_pretrained(None, config=own, state_dict=weights, **reading)
    if source.gguf is not None:
        apply_rope_factors(source.gguf, source.path, module)
    elif (source.path / GENERATION_CONFIG).is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(
            str(source.path), local_files_only=True
        )
    return module, report


def eos_token_ids(config: Any, generation_config: Any) -> tuple[int, ...]:
    """Every id that ends a generation, ascending: those of the generation config, else of the model
    config.
    """
    for source in (generation_config, config):
        found = None if source is None else source.eos_token_id
        if found is not None:
            return tuple(sorted({found} if isinstance(found, int) else set(found)))
    return ()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers on standard error: ours are reported by callback."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
