"""How an instance runs its steps: what was asked for, where model and device allow it, and the best
that they allow where nothing was asked.

What cannot be had is refused by name; nothing that was asked for is silently left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from worker.config import WorkerConfig


@dataclass(frozen=True)
class StepWays:
    """``decode_graphs``: decode steps are captured once and launched as a whole. ``under_way``:
    steps launched before the oldest one's results are seen.
    """

    decode_graphs: bool
    under_way: int

    @override
    def __str__(self) -> str:
        graphs = "in CUDA graphs" if self.decode_graphs else "launch by launch"
        return f"decodes {graphs}, {self.under_way} under way"


@dataclass(frozen=True)
class StepMeans:
    """What a loaded model offers. ``no_graphs``: why its decode steps cannot be captured where it
    is; None where they can. ``has_states``: some layer keeps a state that each token changes in
    place.
    """

    on_gpu: bool
    no_graphs: str | None
    has_states: bool


def step_ways(config: WorkerConfig, means: StepMeans) -> StepWays:
    """Raises ValueError for what was asked for and cannot be had."""
    return StepWays(_graphs(config, means), _under_way(config, means))


def _graphs(config: WorkerConfig, means: StepMeans) -> bool:
    why_not = means.no_graphs
    if config.attention_dp_size > 1:
        why_not = "attention_dp_size above 1"
    if config.decode_graphs is None:
        # Sums over several ranks within a graph have not been seen on devices yet.
        return why_not is None and config.tensor_parallel_size == 1
    if config.decode_graphs and why_not is not None:
        raise ValueError(
            f"decode_graphs: expected a model and a device that have them, got {why_not}; leave "
            "decode_graphs out"
        )
    return config.decode_graphs


def _under_way(config: WorkerConfig, means: StepMeans) -> int:
    why_not = None
    if means.has_states:
        # A row that nobody wants would change a state for good.
        why_not = "a model with recurrent states"
    elif config.attention_dp_size > 1:
        why_not = "attention_dp_size above 1"
    if config.steps_under_way is None:
        return 2 if means.on_gpu and why_not is None else 1
    if config.steps_under_way > 1 and why_not is not None:
        raise ValueError(
            f"steps_under_way: expected 1 with {why_not}, got {config.steps_under_way}; leave "
            "steps_under_way out"
        )
    return config.steps_under_way
