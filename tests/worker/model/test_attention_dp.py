"""Ranks with whole attention and a part of every MLP: each computes sequences of its own, and the
leader gets the logits of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvcache_core.layout import LayoutPlan
from kvcache_core.storage import TorchStorage
from tests.support.rank_threads import on_dp_ranks
from tests.worker.model.test_tensor_parallel import Absent, Way, load, write
from worker.model.dp_ranks import DpRanks
from worker.model.dp_runner import DpRunner
from worker.model.errors import ModelLoadError
from worker.model.families import describe
from worker.model.loader import load_model
from worker.model.networks import FusedModel, PlainModel
from worker.model.rank_sum import OnlyRank
from worker.model.runner import ModelRunner, SequenceSlice
from worker.model.shard import Shard, ShardPlan

BLOCK = 8
TOKENS = np.random.default_rng(5).integers(0, 256, (3, 40)).astype(np.int32)

Chunk = tuple[int, int, int, bool]
"""Sequence, start, end, whether its logits are wanted."""
Step = tuple[tuple[Chunk, ...], ...]
"""Of each rank."""

STEPS: tuple[Step, ...] = (
    (((0, 0, 20, False),), ((1, 0, 5, True), (2, 0, 30, False))),
    (((0, 20, 33, True),), ()),
    ((), ((1, 5, 6, True), (2, 30, 31, True))),
    (((0, 33, 34, True),), ((1, 6, 7, True), (2, 31, 32, True))),
    (((0, 34, 36, False),), ((1, 7, 9, False),)),
)
"""Of two ranks: unlike numbers of rows, chunks that draw nothing, and a rank that has no work."""


def pieces(chunks: Sequence[Chunk], groups: int) -> list[SequenceSlice]:
    return [
        SequenceSlice(
            TOKENS[sequence, start:end],
            start,
            tuple(np.arange(5, dtype=np.int32) + 5 * sequence for _ in range(groups)),
            wanted,
        )
        for sequence, start, end, wanted in chunks
    ]


class Rig:
    """A model with pages for all sequences, and what the pages hold."""

    def __init__(self, path: Path, ranks: OnlyRank | DpRanks, way: Way) -> None:
        loaded = load(path, ranks)
        plan = LayoutPlan.derive(loaded.specs, tokens_per_block=BLOCK)
        self.groups = len(plan.layer_groups)
        self.storage = TorchStorage(plan, [15] * len(plan.pool_groups))
        self.runner = ModelRunner(loaded, plan, self.storage, way(loaded))
        self.specs = loaded.specs

    def pages(self) -> torch.Tensor:
        """Bytes of all pools."""
        return torch.cat([self.storage.kv(spec.layer_id).flatten() for spec in self.specs])


def alone(path: Path, way: Way) -> list[torch.Tensor]:
    """Every step of all sequences on one rank that has the whole model."""
    rig = Rig(path, OnlyRank(), way)
    return [
        rig.runner.forward(pieces([chunk for rank in step for chunk in rank], rig.groups))
        for step in STEPS
    ]


def shared(path: Path, way: Way, ranks: DpRanks) -> tuple[list[torch.Tensor], list[bool]]:
    """What this rank gets of each step, and whether it changed its pages."""
    rig = Rig(path, ranks, way)
    runner = DpRunner(rig.runner, ranks)
    found, changed = [], []
    for step in STEPS:
        before = rig.pages()
        rows = [sum(end - start for _, start, end, _ in rank) for rank in step]
        draws = [sum(wanted for *_, wanted in rank) for rank in step]
        found.append(runner.forward(pieces(step[runner.rank], rig.groups), rows, draws))
        changed.append(not torch.equal(before, rig.pages()))
    return found, changed


@pytest.mark.parametrize(
    ("way", "family"),
    [
        (FusedModel, "llama"),
        (FusedModel, "qwen3"),
        (PlainModel, "gemma3_text"),
        (PlainModel, "mixtral"),
    ],
)
def test_two_ranks_compute_what_one_does(
    tiny_model: Callable[[str], Path], way: Way, family: str
) -> None:
    path = tiny_model(family)
    whole = alone(path, way)
    (leader, leader_changed), (other, other_changed) = on_dp_ranks(
        2, lambda ranks: shared(path, way, ranks)
    )
    for step, logits in enumerate(whole):
        assert leader[step].shape == logits.shape
        torch.testing.assert_close(leader[step], logits, atol=2e-4, rtol=0)
    assert all(len(logits) == 0 for logits in other)
    # A dummy request touches no page.
    assert leader_changed == [True, True, False, True, True]
    assert other_changed == [True, False, True, True, True]


def test_what_a_rank_holds(tiny_model: Callable[[str], Path]) -> None:
    """All heads and half of the inner size."""
    path = tiny_model("llama")
    whole = load(path, OnlyRank())
    part = on_dp_ranks(2, lambda ranks: load(path, ranks))[1]
    assert part.facts == whole.facts
    assert part.specs == whole.specs
    assert part.ranks.shard == Shard(1, 2, 2)
    config = part.module.config
    assert config.intermediate_size == whole.module.config.intermediate_size // 2
    assert config.num_attention_heads == whole.module.config.num_attention_heads


def test_heads_need_not_divide(tmp_path: Path) -> None:
    """Three query heads of one kv head on two ranks; tensor parallelism refuses them."""
    numbers = {"num_attention_heads": 3, "num_key_value_heads": 1}
    path = write(tmp_path, "llama", **numbers)
    with pytest.raises(ModelLoadError, match="num_attention_heads 3"):
        load_model(path, ranks=Absent(2))
    whole = alone(path, FusedModel)
    leader = on_dp_ranks(2, lambda ranks: shared(path, FusedModel, ranks))[0][0]
    for logits, expected in zip(leader, whole, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def test_an_inner_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "llama", intermediate_size=81)
    with pytest.raises(ModelLoadError, match="intermediate_size 81; choose another attention_dp"):
        on_dp_ranks(2, lambda ranks: load(path, ranks))


def test_shared_weights_in_other_places_are_refused() -> None:
    config = transformers.LlamaConfig()
    config.base_model_tp_plan = {
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.shared_mlp.up_proj": "colwise",
    }
    facts = describe(config.to_dict())
    ShardPlan(Shard(1, 2), facts, config)
    with pytest.raises(ModelLoadError, match=r"alone, got layers\.\*\.shared_mlp\.up_proj; use"):
        ShardPlan(Shard(1, 2, 2), facts, config)


def test_dp_groups_of_several_ranks_are_not_there() -> None:
    with pytest.raises(ValueError, match="dp_size: expected 1 or 4, got 2"):
        Shard(0, 4, 2)
