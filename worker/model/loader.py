"""Loading a model for inference: files checked, weights in one dtype on one device, facts beside
the module.

The module is transformers' own, in eval mode, with our paged attention. Loading reads local files
only and never runs code that comes with a model.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.utils import logging as transformers_logging

from kvcache_core.spec import ElementType, KVCacheLayerSpec
from worker.config import ElementType as ConfiguredType
from worker.config import KVElementType
from worker.model.attention import PAGED
from worker.model.errors import ModelLoadError
from worker.model.families import KNOWN_FAMILIES, ModelFacts, describe
from worker.model.gguf_model import apply_rope_factors, configuration, state_dict
from worker.model.inspection import check_tokens_alone, inspect_family
from worker.model.kv_scales import KVScales, read_scales, scales_of
from worker.model.kv_types import check_device, kv_element_type
from worker.model.pageable import SERVED, Configuration
from worker.model.quantisation import without_kv_scheme
from worker.model.rank_sum import OnlyRank, RankSum
from worker.model.rank_weights import rank_weights, stored_type
from worker.model.shard import ShardPlan
from worker.model.source import ModelSource, locate
from worker.progress import Progress

_TRANSFORMERS: Final = threading.Lock()
GENERATION_CONFIG: Final = "generation_config.json"
SHOWN: Final = 8
"""Names of tensors in one message."""

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
    kv_scales: KVScales | None = None
    """Of the whole model; None unless ``specs`` are float8."""

    @property
    def own_kv_scales(self) -> torch.Tensor | None:
        """Of this rank's kv heads, on the model's device: float32 ``[layers, 2, num_kv_heads]``."""
        if self.kv_scales is None:
            return None
        heads = self.ranks.shard.kv_heads(self.whole_facts.num_kv_heads)
        return self.kv_scales.of_heads(heads, self.device)

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
    kv_dtype: KVElementType = "auto",
    ranks: RankSum = OnlyRank(),  # noqa: B008  # a value
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a Hugging Face directory or a GGUF file, or one rank's part of it.

    Args:
        path: the directory or file.
        device: a torch device.
        dtype: of weights and activations. ``auto`` is float32 on CPU, elsewhere the checkpoint's
            type (bfloat16 for GGUF).
        kv_dtype: of KV pages. ``auto`` is the weights' type; ``fp8`` takes the checkpoint's scales.
        ranks: the ranks that share the model, this one among them. Only this one's part is read.
        progress: called with one short sentence at each stage.

    Raises:
        ModelLoadError: nothing there, unknown family, files missing, truncated or incomplete, types
            that do not go together.
    """
    source = locate(path)
    started = time.monotonic()
    progress(f"loading {source.path.name} ({source.weight_bytes / 1e6:.0f} MB)")
    target = _device(device)
    try:
        with quiet_transformers():
            config = _configuration(source)
            whole = config.to_dict()
            whole_facts = describe(whole)
            known = whole_facts.family in KNOWN_FAMILIES
            if not known:
                whole_facts = inspect_family(config, whole_facts)
            plan = ShardPlan(ranks.shard, whole_facts, config)
            chosen = _load_dtype(source, config, target, dtype)
            kv_element = kv_element_type(kv_dtype, _element_type(chosen))
            check_device(kv_element, target)
            scales = _kv_scales(source, whole_facts, kv_element, progress)
            module = _read(source, config, plan, chosen, progress)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise ModelLoadError(f"{source.path}: transformers could not load it: {error}") from error
    module = module.to(target).eval().requires_grad_(requires_grad=False)
    if not known:
        check_tokens_alone(module, whole_facts)
    facts = plan.facts()
    progress(
        f"loaded {facts.family}: {sum(p.numel() for p in module.parameters()) / 1e6:.0f} M "
        "parameters "
        f"in {_element_type(module.dtype).value} on {target}, {time.monotonic() - started:.1f} s"
    )
    return LoadedModel(
        module=module,
        facts=facts,
        whole_facts=whole_facts,
        configuration=whole,
        ranks=ranks,
        shard_plan=plan,
        specs=facts.layer_specs(kv_element),
        eos_token_ids=eos_token_ids(module.config, module.generation_config),
        device=target,
        dtype=module.dtype,
        kv_scales=scales,
    )


def _device(name: str) -> torch.device:
    """The device with its index, as tensors on it report it."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _load_dtype(
    source: ModelSource, config: Any, device: torch.device, dtype: ConfiguredType
) -> torch.dtype:
    if dtype != "auto":
        return TORCH_TYPES[ElementType(dtype)]
    if device.type == "cpu":
        return torch.float32
    if source.gguf is not None:
        return torch.bfloat16
    declared: torch.dtype | None = config.dtype
    return declared or stored_type(source.shards[0]) or torch.float32


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
    config = without_kv_scheme(transformers.AutoConfig.from_pretrained(**source.arguments()))
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"model family {source.model_type!r} is not supported: transformers has no causal "
            f"language model of it; {SERVED}"
        )
    return config


def _kv_scales(
    source: ModelSource, facts: ModelFacts, element: ElementType, progress: Progress
) -> KVScales | None:
    if element is not ElementType.FLOAT8_E4M3:
        return None
    size = facts.num_layers, facts.num_kv_heads
    scales = scales_of({}, *size) if source.gguf is not None else read_scales(source.shards, *size)
    progress(
        f"fp8 keys and values: scales of {scales.given} of {facts.num_layers} layers in the "
        f"checkpoint{', 1 for the others' if scales.given < facts.num_layers else ''}"
    )
    return scales


def _read(
    source: ModelSource, config: Any, plan: ShardPlan, dtype: torch.dtype, progress: Progress
) -> Any:
    """The transformers module with all weights of this rank, which are read by us."""
    own = copy.deepcopy(config)
    for name, value in plan.configuration().items():
        setattr(own, name, value)
    if source.gguf is not None:
        weights = state_dict(source.gguf, source.path, config, dtype, progress, plan)
        module = _made(source, own, weights, dtype, progress)
        apply_rope_factors(source.gguf, source.path, module)
        return module
    with rank_weights(source.shards, plan, progress) as parts:
        module = _made(source, own, parts, dtype, progress)
    if (source.path / GENERATION_CONFIG).is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(
            str(source.path), local_files_only=True
        )
    return module


def _made(
    source: ModelSource,
    config: Any,
    weights: Mapping[str, object],
    dtype: torch.dtype,
    progress: Progress,
) -> Any:
    """Raises ModelLoadError: the weights are not those of the configuration; all are named."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        attn_implementation=PAGED,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # so that all of them are told, by us
        output_loading_info=True,
    )
    missing = sorted(map(str, report["missing_keys"]))
    wrong = [f"the checkpoint lacks {len(missing)} weights: {_some(missing)}"] if missing else []
    wrong += [
        f"{name}: expected {list(expected)}, got {list(got)}"
        for name, got, expected in sorted(report["mismatched_keys"])
    ]
    if wrong:
        raise ModelLoadError(f"{source.path}: {'; '.join(wrong[:SHOWN])}")
    extra = sorted(map(str, report["unexpected_keys"]))
    if extra:
        progress(f"{len(extra)} tensors without a place in the model are left out: {_some(extra)}")
    return module


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


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
    """No progress bars and reports of transformers on standard error: ours come by callback.

    One thread at a time: these switches are the process's, and so are functions that transformers
    replaces while it loads (tying of weights among them). Two threads would leave each other's.
    """
    with _TRANSFORMERS:
        yield from _quiet()


def _quiet() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()
