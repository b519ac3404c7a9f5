"""vLLM's figures, measured by vLLM's own Python: run as a file, with a job as JSON argument.

Knows nothing of this project, since that environment need not have it. Every line that begins
with ``MARK`` is one JSON message for ``vllm_peer``; whatever else comes is vLLM's own. A message
is ``{"fact": name, "value": ...}``, ``{"key": name, "value": number}`` or
``{"key": name, "reason": text}``.

The engine is stepped here, so that the times of steps are seen: with tokens for every sequence,
two neighbours are a step of the whole batch apart.
"""

import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MARK = "pageferry-peer: "
PATIENCE_S = 10.0


def tell(**message: Any) -> None:
    """One message."""
    print(MARK + json.dumps(message), flush=True)


class Engine:
    """vLLM in this process. Prompts are random tokens, answers greedy."""

    def __init__(self, job: dict[str, Any]) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        tell(fact="version", value=vllm.__version__)
        self._engine: Any = vllm.LLM(**job["engine"]).llm_engine
        self._params: Any = vllm.SamplingParams
        # LLM.generate and LLM.enqueue ask for the last output alone, which hides the steps.
        self._kind: Any = RequestOutputKind.DELTA
        self._made = 0
        self._random = random.Random(0)
        self._vocab: int = job["vocab"]

    def run(self, requests: int, prompt: int, output: int) -> tuple[float, list[tuple[float, int]]]:
        """When the requests were made, and of each step with tokens when it ended and how many
        there were: one of each sequence that ran.
        """
        prompts = [
            {"prompt_token_ids": [self._random.randrange(1, self._vocab) for _ in range(prompt)]}
            for _ in range(requests)
        ]
        params = self._params(
            max_tokens=output,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kind,
        )
        steps: list[tuple[float, int]] = []
        began = time.perf_counter()
        for one in prompts:
            self._made += 1
            self._engine.add_request(str(self._made), one, params)
        while self._engine.has_unfinished_requests():
            tokens = sum(len(one.outputs[0].token_ids) for one in self._engine.step())
            if tokens:
                steps.append((time.perf_counter(), tokens))
        found = sum(tokens for _, tokens in steps)
        if found != requests * output:
            raise RuntimeError(f"expected {requests} x {output} tokens, got {found}")
        return began, steps


def decode_tok_s(engine: Engine, load: dict[str, int]) -> float:
    """Of one sequence, after its first token."""
    _, steps = engine.run(**load)
    return (len(steps) - 1) / (steps[-1][0] - steps[0][0])


def prefill_ms(engine: Engine, tokens: int) -> float:
    """From the request to its one token."""
    began, steps = engine.run(1, tokens, 1)
    return (steps[-1][0] - began) * 1e3


def wide_step_ms(engine: Engine, load: dict[str, int]) -> float:
    """Median of the steps that gave every sequence a token, as did the step before."""
    _, steps = engine.run(**load)
    apart = [
        ends - before
        for (before, first), (ends, second) in itertools.pairwise(steps)
        if first == second == load["requests"]
    ]
    if not apart:
        raise RuntimeError(f"no two steps of all {load['requests']} sequences: {steps[:5]} ...")
    return statistics.median(apart) * 1e3


def tok_s(engine: Engine, load: dict[str, int]) -> float:
    """Output tokens a second, from the requests to the last token."""
    began, steps = engine.run(**load)
    return load["requests"] * load["output"] / (steps[-1][0] - began)


def rested(sample: Callable[[], float], rest_s: float) -> float:
    """A sample of a device that has been idle."""
    time.sleep(rest_s)
    return sample()


def median_of(sample: Callable[[], float], rounds: int, rest_s: float) -> float:
    """After one that warms up; no further one once ``PATIENCE_S`` are used."""
    sample()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < rounds and (not samples or time.perf_counter() - began < PATIENCE_S):
        samples.append(rested(sample, rest_s))
    return statistics.median(samples)


def main() -> None:
    """Make the engine and measure what the job names."""
    job = json.loads(sys.argv[1])
    asked = job["workloads"]
    engine = Engine(job)
    engine.run(1, 1, 1)
    tell(fact="has_first_token", value=True)
    samples: dict[str, Callable[[], float]] = {
        "decode_b1_tok_s": lambda: decode_tok_s(engine, asked["decode"]),
        "prefill_8k_ms": lambda: prefill_ms(engine, asked["prefill_tokens"]),
        "b64_4k_step_ms": lambda: wide_step_ms(engine, asked["wide"]),
    }
    for key, load in asked["loads"].items():
        samples[key] = lambda load=load: tok_s(engine, load)  # type: ignore[misc]
    for key in job["keys"]:
        # Its prefill takes seconds, and its steps are many: one run is warm enough.
        once = key == "b64_4k_step_ms"
        try:
            if once:
                value = rested(samples[key], job["rest_s"])
            else:
                value = median_of(samples[key], job["rounds"], job["rest_s"])
        except Exception as error:  # noqa: BLE001  # told, and the others are worth having
            traceback.print_exc()
            tell(key=key, reason=f"{type(error).__name__}: {error}")
        else:
            tell(key=key, value=value)


if __name__ == "__main__":
    main()
