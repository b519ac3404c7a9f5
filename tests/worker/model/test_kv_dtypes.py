"""float8 keys and values: the model over them is an oracle that rounds as they do, whatever the
backend, and pages that were moved give what pages that stayed give.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_core.layout import LayoutPlan
from kvcache_core.spec import ElementType
from kvcache_core.storage import TorchStorage
from tests.support.oracle import load_reference
from tests.support.rank_threads import on_ranks
from tests.support.rounded_kv import round_kv, with_tensors
from tests.worker.model.harness import PagedModel
from worker.facts import engine_facts
from worker.model.backend import TorchBackend, triton_backend
from worker.model.errors import ModelLoadError
from worker.model.fused import LayerParts
from worker.model.kv_types import check_capability, kv_element_type
from worker.model.loader import LoadedModel, load_model
from worker.model.networks import FusedModel
from worker.model.products import make_product
from worker.model.rank_sum import RankSum
from worker.model.runner import ModelRunner

TinyModel = Callable[[str], Path]
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 60)]
Pieces = tuple[dict[str, list[int]], ...]
LONG: Pieces = (
    {"a": TOKENS[:30], "b": TOKENS[:3]},
    {"a": TOKENS[30:45], "b": TOKENS[3:4], "c": TOKENS[:1]},
    {"a": TOKENS[45:46], "b": TOKENS[4:5], "c": TOKENS[1:2]},
)
SHORT: Pieces = ({"a": TOKENS[:7]}, {"a": TOKENS[7:11], "b": TOKENS[:1]}, {"a": TOKENS[11:12]})
"""For kernels in an interpreter."""
FLIP = 2e-2
"""A key that lies between two float8 numbers may be rounded to either after another order of sums:
a sixteenth of one of a thousand numbers.
"""
HEAD_SCALES = torch.tensor([[1.5, 0.3], [0.7, 0.02], [0.05, 1.1]])
"""Of the values of each layer and kv head."""


@pytest.fixture(scope="module")
def scaled(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Checkpoints with a key scale a layer and a value scale a kv head, which their configuration
    tells of too.
    """
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
    }

    def path(family: str) -> Path:
        own = "model.layers.{}.self_attn."
        tensors = {f"{own.format(layer)}k_scale": torch.tensor(0.015) for layer in range(3)}
        tensors |= {f"{own.format(i)}v_scale": HEAD_SCALES[i].clone() for i in range(3)}
        folder = tmp_path_factory.mktemp("scaled") / family
        with_tensors(tiny_model(family), folder, tensors)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
        return folder

    return path


def kernels(loaded: LoadedModel, plan: LayoutPlan, storage: TorchStorage) -> ModelRunner:
    layers: Any = pytest.importorskip("worker.model.kernel_layers", exc_type=ModuleNotFoundError)
    network = FusedModel(loaded, LayerParts(make_product, layers.KernelPlacing))
    return ModelRunner(loaded, plan, storage, network, triton_backend)


def scales_in(loaded: LoadedModel) -> torch.Tensor:
    assert loaded.kv_scales is not None
    return loaded.kv_scales.values


@pytest.mark.parametrize(
    ("family", "make_runner", "steps"),
    [("gemma3_text", None, LONG), ("qwen2", None, LONG), ("qwen2", kernels, SHORT)],
    ids=["gemma3", "qwen2", "qwen2 by kernels"],
)
def test_the_model_is_an_oracle_with_the_same_rounded_keys_and_values(
    scaled: TinyModel, family: str, make_runner: Any, steps: Pieces
) -> None:
    path = scaled(family)
    paged = PagedModel(path, kv_dtype="fp8", backend=TorchBackend, make_runner=make_runner)
    assert {spec.dtype for spec in paged.loaded.specs} == {ElementType.FLOAT8_E4M3}
    scales = scales_in(paged.loaded)
    torch.testing.assert_close(scales[:, 0], torch.full((3, 2), 0.015))
    assert torch.equal(scales[:, 1], HEAD_SCALES)
    plain, oracle = load_reference(path), round_kv(load_reference(path), scales)
    for pieces in steps:
        found = paged.feed(**pieces)
        for name, row in zip(pieces, found, strict=True):
            ids = torch.tensor([paged.tokens[name]])
            with torch.inference_mode():
                expected, exact = oracle(ids).logits[0, -1], plain(ids).logits[0, -1]
            torch.testing.assert_close(row, expected, atol=FLIP, rtol=0)
            assert name != "a" or (row - exact).abs().max() > 2 * FLIP


def test_moved_pages_give_what_those_that_stayed_give(scaled: TinyModel) -> None:
    """Bit for bit: nothing is converted on the way."""
    path = scaled("qwen2")
    stayed, there = (PagedModel(path, kv_dtype="fp8", seed=seed) for seed in (0, 1))
    stayed.feed(a=TOKENS[:20])
    stayed.feed(a=TOKENS[20:45])
    there.slice("a", TOKENS[:45])
    source = stayed.slice("a", TOKENS[45:46])
    target = there.slice("a", TOKENS[45:46])
    for group, (ours, theirs) in enumerate(
        zip(source.block_tables, target.block_tables, strict=True)
    ):
        live = (ours >= 0) & (theirs >= 0)
        assert live.any()
        assert (ours[live] != theirs[live]).any()
        pool_group = stayed.plan.layer_groups[group].pool_group
        for pool in range(len(stayed.plan.pool_groups[pool_group].slot_bytes)):
            given = stayed.storage.pool_bytes(pool_group, pool)
            there.storage.pool_bytes(pool_group, pool)[theirs[live]] = given[ours[live]]
    expected, found = stayed.runner.forward([source]), there.runner.forward([target])
    assert expected.isfinite().all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_pages_hold_the_weights_type_or_float8(weights: Any) -> None:
    own = ElementType(weights)
    assert kv_element_type("auto", own) is kv_element_type(weights, own) is own
    assert kv_element_type("fp8", own) is ElementType.FLOAT8_E4M3
    other: Any = "float16" if weights == "float32" else "float32"
    with pytest.raises(ModelLoadError, match=f"kv_cache_dtype {other}: expected fp8 or {weights}"):
        kv_element_type(other, own)


def test_gpus_that_do_not_convert_float8_are_refused() -> None:
    for fitting in ((8, 9), (9, 0), (12, 0)):
        check_capability(fitting)
    with pytest.raises(ModelLoadError, match=r"capability 8\.9 or more, got 8\.0"):
        check_capability((8, 0))


def test_without_scales_in_the_checkpoint_they_are_one_and_said_to_be(
    tiny_model: TinyModel,
) -> None:
    lines: list[str] = []
    loaded = load_model(tiny_model("llama"), kv_dtype="fp8", progress=lines.append)
    assert torch.equal(scales_in(loaded), torch.ones(3, 2, 2))
    assert (
        "fp8 keys and values: scales of 0 of 3 layers in the checkpoint, 1 for the others" in lines
    )
    assert load_model(tiny_model("llama")).kv_scales is None


def test_every_rank_has_the_scales_of_its_heads_and_tells_those_of_all(scaled: TinyModel) -> None:
    path, loading = scaled("llama"), Lock()

    def load(ranks: RankSum) -> LoadedModel:
        with loading:
            return load_model(path, kv_dtype="fp8", ranks=ranks)

    whole, parts = load_model(path, kv_dtype="fp8"), on_ranks(2, load)
    assert whole.own_kv_scales is not None
    for rank, part in enumerate(parts):
        assert part.own_kv_scales is not None
        assert torch.equal(part.own_kv_scales, whole.own_kv_scales[:, :, rank : rank + 1])
        assert engine_facts(part, model_path=str(path), model_name="m").kv_scales == (
            engine_facts(whole, model_path=str(path), model_name="m").kv_scales
        )
