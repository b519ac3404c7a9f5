"""Recording a piece of device work once, to launch it again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from typing_extensions import override

Body = Callable[[], torch.Tensor]
"""Work over fixed memory; gives its result's memory, fixed too once captured."""

WARM_UPS: Final = 2
"""Runs before a capture: compiling kernels and making workspaces cannot be captured."""


class Capture(Protocol):
    """How a body becomes something to launch. The body's effects must bear repetition."""

    def __call__(self, body: Body) -> Body: ...


class RunEachTime(Capture):
    """No recording: where there are no graphs."""

    @override
    def __call__(self, body: Body) -> Body:
        return body


class CUDAGraphs(Capture):
    """CUDA graphs that share one memory pool: only one of them runs at a time, and a result is
    valid until its own graph runs again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def __call__(self, body: Body) -> Body:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                body()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = body()

        return _Recorded(body, graph, result)


@dataclass(frozen=True)
class _Recorded:
    """A graph, its result, and the body, which holds the memory that the graph reads."""

    body: Body
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result
