"""Models shared by ranks: together they compute what the whole model does, and each reads its part
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from typing_extensions import override

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.models import FAMILIES, write_random_model
from tests.support.rank_threads import on_ranks
from tests.worker.model.test_gguf import ARCHITECTURES, write_gguf
from worker.model.errors import ModelLoadError
from worker.model.families import describe
from worker.model.fused import FUSED_FAMILIES
from worker.model.loader import LoadedModel, load_model
from worker.model.networks import FusedModel, Network, PlainModel
from worker.model.rank_sum import OnlyRank, RankSum
from worker.model.rank_weights import rank_weights
from worker.model.runner import ModelRunner, SequenceSlice
from worker.model.shard import Shard, ShardPlan

TinyModel = Callable[[str], Path]
Way = Callable[[LoadedModel], Network]

WAYS = [
    *[(PlainModel, family) for family in FAMILIES],
    *[(FusedModel, family) for family in sorted(FUSED_FAMILIES)],
]
TOKENS = np.random.default_rng(3).integers(0, 256, 45).astype(np.int32)


LOADING = Lock()
"""transformers loads in one thread of a process at a time."""


def load(path: Path, ranks: RankSum) -> LoadedModel:
    with LOADING:
        return load_model(path, ranks=ranks)


def logits(path: Path, ranks: RankSum, way: Way) -> torch.Tensor:
    """Logits after a chunk, a second one and one more token: ``[3, vocab]``."""
    loaded = load(path, ranks)
    plan = LayoutPlan.derive(loaded.specs, tokens_per_block=8)
    storage = TorchStorage(plan, [16] * len(plan.pool_groups))
    runner = ModelRunner(loaded, plan, storage, way(loaded))
    tables = tuple(np.arange(6, dtype=np.int32) + 6 * i for i in range(len(plan.layer_groups)))
    found = [
        runner.forward([SequenceSlice(TOKENS[start:end], start, tables, wants_logits=True)])[0]
        for start, end in ((0, 20), (20, 44), (44, 45))
    ]
    return torch.stack(found)


def assert_shared(path: Path, size: int, way: Way) -> None:
    """Every rank has the logits of the whole model, and all have the same to the last bit."""
    whole = logits(path, OnlyRank(), way)
    first, *others = on_ranks(size, lambda ranks: logits(path, ranks, way))
    torch.testing.assert_close(first, whole, atol=2e-4, rtol=0)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize(("way", "family"), WAYS)
def test_two_ranks_of_every_family(tiny_model: TinyModel, way: Way, family: str) -> None:
    assert_shared(tiny_model(family), 2, way)


@pytest.mark.parametrize("family", ["gemma2", "starcoder2"])
def test_two_ranks_of_the_general_rule(tiny_model: TinyModel, family: str) -> None:
    """Softcaps, biases of sums."""
    assert_shared(tiny_model(family), 2, PlainModel)


HEADS = {
    "ranks exceed the kv heads": (2, 6, 1),
    "some ranks share a kv head": (4, 8, 2),
    "as Qwen 0.5B": (2, 14, 2),
    "as Qwen 1.5B": (2, 12, 2),
}


@pytest.mark.parametrize(("size", "heads", "kv_heads"), HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("way", [PlainModel, FusedModel])
def test_heads(tmp_path: Path, way: Way, size: int, heads: int, kv_heads: int) -> None:
    """Qwen 2 has biases, which are cut as their matrices are."""
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    assert_shared(write(tmp_path, "qwen2", **numbers), size, way)


@pytest.mark.parametrize("way", [PlainModel, FusedModel])
def test_a_bias_of_a_sum_is_added_once(tmp_path: Path, way: Way) -> None:
    assert_shared(write(tmp_path, "llama", attention_bias=True, mlp_bias=True), 2, way)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    way = FusedModel if family in FUSED_FAMILIES else PlainModel
    model = tiny_model(family)
    kind = GGMLQuantizationType.Q8_0
    assert_shared(write_gguf(model, family, tmp_path / "tiny.gguf", kind=kind), 2, way)


def test_a_rank_reads_its_part_alone(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    config = transformers.AutoConfig.from_pretrained(path)
    files = [path / "model.safetensors"]
    lines: list[str] = []

    def read(shard: Shard) -> dict[str, torch.Tensor]:
        plan = ShardPlan(shard, describe(config.to_dict()), config)
        with rank_weights(files, plan, lines.append) as parts:
            return {name: part[...] for name, part in parts.items()}

    whole, *parts = map(read, (Shard(), Shard(0, 2), Shard(1, 2)))
    mega = [
        f"{sum(v.nbytes for v in part.values()) / 1e6:.0f} MB (100 %)" for part in (whole, *parts)
    ]
    assert [end in line for end, line in zip(mega, lines, strict=True)] == [True] * 3
    cut = [name for name in whole if "proj" in name]
    assert len(cut) == 3 * 7
    for name, values in whole.items():
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        own = [part[name] for part in parts]
        if name in cut:
            assert torch.equal(torch.cat(own, axis), values)
            assert all(one.is_contiguous() for one in own)
            if axis:  # copied, and no more than this
                assert all(one.untyped_storage().nbytes() == values.nbytes // 2 for one in own)
        else:
            assert all(torch.equal(one, values) for one in own)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_rank_reads_its_part_of_every_expert(tiny_model: TinyModel, family: str) -> None:
    path = tiny_model(family)
    config = transformers.AutoConfig.from_pretrained(path)

    def read(shard: Shard) -> dict[str, torch.Tensor]:
        plan = ShardPlan(shard, describe(config.to_dict()), config)
        with rank_weights([path / "model.safetensors"], plan, lambda line: None) as parts:
            return {name: part[...] for name, part in parts.items()}

    whole, *parts = map(read, (Shard(), Shard(0, 2), Shard(1, 2)))
    experts = [name for name in whole if ".experts." in name]
    assert len(experts) == {"mixtral": 3 * 4 * 3, "qwen3_moe": 2 * 6 * 3}[family]
    for name in experts:
        axis = 1 if name.endswith(("w2.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat([part[name] for part in parts], axis), whole[name])
    routers = [name for name in whole if name.endswith(".gate.weight")]
    assert routers
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in routers)


def test_experts_in_one_tensor_of_a_file_are_refused() -> None:
    config = FAMILIES["qwen3_moe"]()
    plan = ShardPlan(Shard(1, 2), describe(config.to_dict()), config)
    for name, shape in (("gate_up_proj", (6, 64, 48)), ("down_proj", (6, 48, 32))):
        with pytest.raises(ModelLoadError, match=rf"{name}: expected one matrix an expert"):
            plan.part(f"model.layers.0.mlp.experts.{name}", shape)


def test_what_a_rank_knows_of_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, "gemma3_text")
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    loaded = on_ranks(2, lambda ranks: load(path, ranks))[1]
    assert (loaded.facts.num_heads, loaded.facts.num_kv_heads) == (3, 1)
    assert (loaded.whole_facts.num_heads, loaded.whole_facts.num_kv_heads) == (6, 2)
    assert {spec.num_kv_heads for spec in loaded.specs} == {1}
    assert loaded.configuration["num_attention_heads"] == 6
    assert loaded.eos_token_ids == (3, 5)


class Absent(RankSum):
    """One rank of ``size`` that nobody meets: for models that are refused before anything is
    read.
    """

    def __init__(self, size: int) -> None:
        self._shard = Shard(0, size)

    @property
    @override
    def shard(self) -> Shard:
        return self._shard

    @override
    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is computed")


REFUSED = {
    "everything that does not divide": (
        4,
        {},
        r"llama cannot be shared out among 4 ranks: num_attention_heads 6; choose another",
    ),
    "by name": (
        3,
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        r"num_attention_heads 8, intermediate_size 80, num_key_value_heads 2 \(neither",
    ),
}


@pytest.mark.parametrize(("size", "changes", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, size: int, changes: dict[str, int], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        load_model(write(tmp_path, "llama", **changes), ranks=Absent(size))


def test_embedding_and_head_are_whole_whatever_the_plan_says() -> None:
    config = FAMILIES["llama"]()
    plan = {"embed_tokens": "embedding_rowwise", **config.base_model_tp_plan}
    config.base_model_tp_plan = plan
    shares = ShardPlan(Shard(1, 2), describe(config.to_dict()), config)
    assert shares.part("model.embed_tokens.weight", (288, 48)) == ()
    assert shares.part("model.layers.0.mlp.up_proj.weight", (80, 48)) == (slice(40, 80),)


def test_a_plan_without_the_experts_is_refused() -> None:
    config = FAMILIES["qwen3_moe"]()
    config.base_model_tp_plan = {
        name: kind for name, kind in config.base_model_tp_plan.items() if "experts" not in name
    }
    with pytest.raises(ModelLoadError, match="does not share its experts out"):
        ShardPlan(Shard(1, 2), describe(config.to_dict()), config)


def test_experts_that_do_not_divide_are_refused() -> None:
    config = FAMILIES["qwen3_moe"]()
    config.update({"moe_intermediate_size": 33})
    with pytest.raises(ModelLoadError, match=r"2 ranks: moe_intermediate_size 33; choose"):
        ShardPlan(Shard(1, 2), describe(config.to_dict()), config)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (None, "has no tensor parallel plan"),
        ({"layers.*.self_attn.q_norm": "colwise_gather_output"}, r"q_norm \(colwise_gather_output"),
    ],
)
def test_a_plan_that_is_not_understood(plan: dict[str, str] | None, why: str) -> None:
    config = transformers.LlamaConfig()
    config.base_model_tp_plan = plan
    with pytest.raises(ModelLoadError, match=why):
        ShardPlan(Shard(1, 2), describe(config.to_dict()), config)


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_kv_head_is_somewhere_and_in_order(size: int, total: int) -> None:
    held = [list(Shard(rank, size).kv_heads(total)) for rank in range(size)]
    assert sorted({head for heads in held for head in heads}) == list(range(total))
    assert held == sorted(held)
    assert len({len(heads) for heads in held}) == 1
    # A rank's query heads attend over its own kv heads.
    queries = 8 * total
    for rank, heads in enumerate(held):
        own = range(rank * queries // size, (rank + 1) * queries // size)
        assert sorted({query // 8 for query in own}) == heads


def write(directory: Path, family: str, **changes: Any) -> Path:
    """A tiny model with other numbers, and biases as random as its matrices."""
    config = FAMILIES[family]()
    config.update(changes)
    return write_random_model(config, directory / family)
