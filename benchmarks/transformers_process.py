"""transformers' ``generate`` in a process of its own, driven over pipes: see
``peer_transformers``.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.closed_loop import LoadResult, Sample


class TransformersProcess:
    """One model, one request at a time. Ended by ``close``."""

    def __init__(self, model: Path, threads: int, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.peer_transformers", str(model)]
        command += ["--threads", str(threads), "--dtype", dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def takes(self, concurrency: int) -> bool:
        """``generate`` has one caller at a time."""
        return concurrency == 1

    def load(self, texts: Sequence[str], concurrency: int, output_tokens: int) -> LoadResult:
        """Every prompt once, in order."""
        if not self.takes(concurrency):
            raise ValueError(f"expected concurrency 1, got {concurrency}")
        assert self._process.stdin is not None
        result = LoadResult()
        started = time.perf_counter()
        for text in texts:
            request = {"prompt": text, "output_tokens": output_tokens}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            times = answer["ms"]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            result.samples.append(
                Sample(times[0], gaps, len(times), times[-1] / 1e3, answer["prompt_tokens"])
            )
        result.wall_s = time.perf_counter() - started
        return result

    def close(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
