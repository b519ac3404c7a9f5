"""Which part of a tensor-parallel model one rank holds: pure arithmetic over names and sizes.

transformers' plan is read as a table of names. A column-parallel matrix is cut by outputs, a
row-parallel one by inputs; the sum of all ranks' row-parallel products is the whole product. Every
expert of a mixture is cut so, and their weighted sum is added up. Everything else, routers too, is
on every rank. Query heads stay with the kv heads they attend over; where ranks exceed the kv heads,
neighbouring ranks hold the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from worker.model.errors import ModelLoadError
from worker.model.families import ModelFacts
from worker.model.pageable import Configuration

KV_PROJECTIONS: Final = frozenset({"k_proj", "v_proj"})
NUMBER: Final = re.compile(r"\.\d+\.")
"""Of a layer or an expert."""

EXPERTS_SIZE: Final = "moe_intermediate_size"
INNER_SIZES: Final = ("intermediate_size", EXPERTS_SIZE)
"""Configuration values that the outputs of column-parallel matrices outside attention have."""

IN_FILES: Final = {
    ".block_sparse_moe.": ".mlp.",
    ".w1": ".gate_proj",
    ".w2": ".down_proj",
    ".w3": ".up_proj",
}
"""Names in files of mixtures of experts, where they differ from those in the table."""


class Cut(Enum):
    """How a module's weights are shared out."""

    COLUMN = "colwise"
    ROW = "rowwise"
    WHOLE = "replicated_with_grad_allreduce"
    """The name transformers has for it. Nothing is trained here."""
    EXPERTS = "moe_tp_experts"
    """A module of all experts, whose result is a part of the sum. Files have a matrix an expert."""
    PACKED = "packed_colwise"
    """Gate and up of all experts as the module holds them: two column-parallel matrices."""


SUMMED: Final = frozenset({Cut.ROW, Cut.EXPERTS})
"""Cuts of modules whose results are added up over the ranks."""

EXPERT_CUTS: Final = {"gate_proj": Cut.COLUMN, "up_proj": Cut.COLUMN, "down_proj": Cut.ROW}


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of the ``size`` ranks that share every layer."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"expected a rank below {self.size}, got {self.rank}")

    def kv_heads(self, total: int) -> range:
        """The kv heads of this rank, of ``total``; one that others have too where ranks exceed
        them.
        """
        if total % self.size == 0:
            each = total // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        first = self.rank * total // self.size
        return range(first, first + 1)


class ShardPlan:
    """How one rank takes its part of one model.

    Raises:
        ModelLoadError: the model cannot be shared out so; every reason is named.
    """

    def __init__(self, shard: Shard, facts: ModelFacts, config: Any) -> None:
        self.shard = shard
        self._facts = facts
        self._inner = _inner_sizes(config.to_dict())
        self._cuts: Mapping[str, Cut] = {}
        if shard.size > 1:
            self._cuts = _cuts(facts.family, config.base_model_tp_plan)
            _check(shard, facts, self._inner)
            if EXPERTS_SIZE in self._inner and Cut.EXPERTS not in self._cuts.values():
                raise ModelLoadError(
                    f"{facts.family}: transformers' plan does not share its experts out; use "
                    "tensor_parallel_size 1"
                )

    def facts(self) -> ModelFacts:
        """The model as this rank holds it: its heads alone."""
        return replace(
            self._facts,
            num_heads=self._facts.num_heads // self.shard.size,
            num_kv_heads=len(self.shard.kv_heads(self._facts.num_kv_heads)),
        )

    def configuration(self) -> Configuration:
        """The configuration values that make transformers' modules as wide as this rank's part."""
        own = self.facts()
        return {
            "num_attention_heads": own.num_heads,
            "num_key_value_heads": own.num_kv_heads,
            "head_dim": own.head_dim,
            **{name: value // self.shard.size for name, value in self._inner.items()},
        }

    def cut_of(self, name: str) -> Cut:
        """How the module or weight of this name (``model.layers.0.mlp.up_proj.weight``) is cut."""
        module = name.removesuffix(".weight").removesuffix(".bias").removeprefix("model.")
        return self._cuts.get(_as_in_table(NUMBER.sub(".*.", module)), Cut.WHOLE)

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Index of this rank's part of a weight of the whole model with this shape.

        Empty for the whole of it, which the bias of a row-parallel product is too (see
        :meth:`owns`).

        Raises:
            ModelLoadError: the file holds all experts in one tensor.
        """
        cut = self.cut_of(name)
        if len(shape) > 2 and cut is not Cut.WHOLE:
            raise ModelLoadError(
                f"{name}: expected one matrix an expert, got all experts in one tensor of shape "
                f"{list(shape)}, which is not shared out; use tensor_parallel_size 1"
            )
        if cut is Cut.COLUMN:
            return (self._columns(name, shape[0]),)
        if cut is Cut.ROW and len(shape) == 2:
            return (slice(None), self._even(shape[1]))
        return ()

    def owns(self, name: str) -> bool:
        """Whether this rank uses the values of this weight. A bias that is added to a sum is added
        once: the other ranks have zeros.
        """
        return self.shard.rank == 0 or not self._is_row_bias(name)

    def _is_row_bias(self, name: str) -> bool:
        return name.endswith(".bias") and self.cut_of(name) is Cut.ROW

    def _columns(self, name: str, rows: int) -> slice:
        module = name.rsplit(".", 2)[-2]
        if module not in KV_PROJECTIONS:
            return self._even(rows)
        heads = self.shard.kv_heads(self._facts.num_kv_heads)
        each = rows // self._facts.num_kv_heads
        return slice(heads.start * each, heads.stop * each)

    def _even(self, length: int) -> slice:
        each = length // self.shard.size
        return slice(self.shard.rank * each, (self.shard.rank + 1) * each)


def _cuts(family: str, plan: Mapping[str, str] | None) -> dict[str, Cut]:
    if not plan:
        raise ModelLoadError(
            f"{family}: transformers has no tensor parallel plan for this family; use "
            "tensor_parallel_size 1"
        )
    known = {cut.value: cut for cut in Cut}
    # What lies outside the layers, embedding and head, is whole on every rank.
    plan = {name: kind for name, kind in plan.items() if name.startswith("layers.")}
    unknown = sorted(f"{name} ({kind})" for name, kind in plan.items() if kind not in known)
    if unknown:
        raise ModelLoadError(
            f"{family}: weights that are shared out in a way that is not supported: "
            f"{', '.join(unknown)}; use tensor_parallel_size 1"
        )
    cuts = {name: known[kind] for name, kind in plan.items()}
    for name in [name for name, cut in cuts.items() if cut is Cut.EXPERTS]:
        cuts |= {f"{name}.*.{matrix}": cut for matrix, cut in EXPERT_CUTS.items()}
    return cuts


def _as_in_table(name: str) -> str:
    for written, meant in IN_FILES.items():
        if meant.endswith("."):
            name = name.replace(written, meant)
        elif name.endswith(written):
            name = name.removesuffix(written) + meant
    return name


def _inner_sizes(configuration: Configuration) -> dict[str, int]:
    return {name: int(configuration[name]) for name in INNER_SIZES if configuration.get(name)}


def _check(shard: Shard, facts: ModelFacts, inner: Mapping[str, int]) -> None:
    """Raises ModelLoadError with everything that does not divide."""
    size = shard.size
    wrong = [
        f"{name} {value}"
        for name, value in {"num_attention_heads": facts.num_heads, **inner}.items()
        if value % size
    ]
    kv_heads = facts.num_kv_heads
    if kv_heads % size and size % kv_heads:
        wrong.append(f"num_key_value_heads {kv_heads} (neither a multiple nor a divisor)")
    if wrong:
        raise ModelLoadError(
            f"{facts.family} cannot be shared out among {size} ranks: {', '.join(wrong)}; choose "
            "another tensor_parallel_size"
        )
