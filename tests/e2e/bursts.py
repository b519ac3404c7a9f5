"""Bursts of long prompts at a service of a tiny model, some of which their clients leave."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from tests.e2e.client import Client
from tests.support.oracle import ReferenceModel, check_equal
from worker.messages import SamplingParams

OUTPUT_TOKENS: Final = 16
PROMPT_TOKENS: Final = (400, 490)
"""At least and at most; with the output within the tiny models' 512."""


@dataclass
class Served:
    """What came of a burst."""

    answers: list[tuple[dict[str, Any], list[int]]] = field(default_factory=list)
    """Of the clients that stayed: request and tokens."""
    left_waiting: int = 0
    """Clients that left before token 1."""
    left_decoding: int = 0

    def judge(self, reference: ReferenceModel) -> None:
        """Every answer is whole and equal to the oracle."""
        for body, output in self.answers:
            assert len(output) == OUTPUT_TOKENS
            params = SamplingParams(temperature=body["temperature"], seed=body["seed"])
            report = check_equal(reference, body["prompt"], output, params)
            assert report.ok, f"{body['seed']}: {report}"


@dataclass(frozen=True)
class Burst:
    """``requests`` at once, no two with a common prefix; ``leaving`` of them are left: a third at
    the first token or a few later, the others after up to ``patience_s``, most of them soon.
    """

    seed: int
    requests: int
    leaving: int
    patience_s: float

    def run(self, client: Client) -> Served:
        """Send it and wait for everybody."""
        leaving = set(Random(self.seed).sample(range(self.requests), self.leaving))
        served, lock = Served(), threading.Lock()

        def one(number: int) -> None:
            random = Random(f"{self.seed} {number}")
            body = _body(random)
            if number not in leaving:
                output = _stay(client, body)
                with lock:
                    served.answers.append((body, output))
                return
            seen = self._leave(client, random, body)
            with lock:
                served.left_waiting += seen == 0
                served.left_decoding += seen > 0

        with ThreadPoolExecutor(self.requests) as pool:
            list(pool.map(one, range(self.requests)))
        return served

    def _leave(self, client: Client, random: Random, body: dict[str, Any]) -> int:
        if random.random() < 1 / 3:
            return client.leave("/v1/completions", 60, random.choice([1, 1, 4, 12]), **body)
        patience_s = self.patience_s * random.random() ** 2
        return client.leave("/v1/completions", patience_s, 1, **body)


def _body(random: Random) -> dict[str, Any]:
    """Greedy and drawn requests in turn, streams and others."""
    return {
        "prompt": [random.randrange(250) for _ in range(random.randint(*PROMPT_TOKENS))],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": float(random.randrange(2)),
        "seed": random.randrange(1 << 30),
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _stay(client: Client, body: dict[str, Any]) -> list[int]:
    if body["seed"] % 2:
        tokens: list[int] = client.complete(**body)["choices"][0]["token_ids"]
        return tokens
    streamed = client.stream("/v1/completions", **body)
    assert streamed.error is None, streamed.error
    assert streamed.done
    return streamed.choices[0].token_ids
