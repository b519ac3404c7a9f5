"""Conversations whose turns run on different context workers: real workers, a tiny model, UCX.

Each turn is judged by the oracle, and says how much of its prompt was fetched instead of computed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.e2e.direct import TOKEN, DirectCluster, direct_cluster
from tests.support.oracle import ReferenceModel, check_equal
from tests.support.raw_front_end import RawFrontEnd
from transfer.wire import pack_ints
from worker.messages import Generate, Prefill, PrefixSource, SamplingParams, StopRule

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

BLOCK = 8
ANSWER_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Cluster:
    """Raw connections to two context workers and a generation worker."""

    a: RawFrontEnd
    b: RawFrontEnd
    generation: RawFrontEnd
    model: ReferenceModel

    async def turn(
        self,
        name: str,
        prompt: list[int],
        context: RawFrontEnd,
        source: RawFrontEnd | None = None,
    ) -> list[int]:
        """Ask, judge; the answer."""
        assert context.welcome is not None
        assert self.generation.welcome is not None
        common = {
            "request_id": name,
            "tokens": pack_ints(prompt),
            "scope": b"tiny",
            "sampling": GREEDY,
            "stop": StopRule(max_tokens=ANSWER_TOKENS),
            "deadline_ms": 60_000,
        }
        hint = None
        if source is not None:
            assert source.welcome is not None
            hint = PrefixSource(peer=source.welcome.peer, tokens=len(prompt))
        destination = self.generation.welcome.incarnation
        context.send(
            Prefill.model_validate({**common, "destination": destination, "prefix_source": hint})
        )
        self.generation.send(Generate.model_validate({**common, "source": context.welcome.peer}))
        for leg in (context, self.generation):
            ended = await leg.end_of(name)
            assert ended.outcome == "succeeded", ended
        output = self.generation.choices[name, 0].output()
        assert len(output) == ANSWER_TOKENS
        judge(self.model, prompt, output)
        return output


def judge(model: ReferenceModel, prompt: list[int], output: list[int]) -> None:
    report = check_equal(model, prompt, output, GREEDY)
    assert report.ok, report


def random_tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return tokens


async def talk(direct: DirectCluster, model: ReferenceModel) -> None:
    """A conversation that moves between context workers, told by raw messages."""
    async with AsyncExitStack() as stack:
        connected = []
        for name in ("a", "b", "generation"):
            front_end = await RawFrontEnd.connect(direct.workers[name].address, TOKEN)
            stack.push_async_callback(front_end.close)
            connected.append(front_end)
        a, b, generation = connected
        cluster = Cluster(a, b, generation, model)
        prompt = random_tokens(100, 1)
        answer = await cluster.turn("first", prompt, a)

        # The next turn runs on B, which fetches the first prompt from A.
        prompt = [*prompt, *answer, *random_tokens(30, 2)]
        answer = await cluster.turn("second", prompt, b, a)
        assert b.started["second"].cached_tokens == 96
        gauges = await b.idle()
        assert (gauges.pulls_succeeded_total, gauges.pulled_tokens_total) == (1, 96)
        assert (await a.idle()).pulls_served_total == 1

        # The third on A, which lacks the second prompt and both answers; the generation worker has
        # everything but the last token.
        cached = (len(prompt) + ANSWER_TOKENS - 1) // BLOCK * BLOCK
        prompt = [*prompt, *answer, *random_tokens(9, 3)]
        await cluster.turn("third", prompt, a, generation)
        assert a.started["third"].cached_tokens == cached
        gauges = await a.idle()
        assert (gauges.pulls_succeeded_total, gauges.pulled_tokens_total) == (1, cached - 96)
        assert gauges.prefill_tokens_total == 100 + len(prompt) - cached

        # What nobody holds is declined, and computed.
        await cluster.turn("fresh", random_tokens(60, 4), b, a)
        assert (await b.idle()).pulls_declined_total == 1
        await generation.idle()


def ask(client: Client, model: ReferenceModel, prompt: list[int]) -> tuple[list[int], int]:
    """Over HTTP: the answer, and how many tokens of the prompt were cached."""
    answer = client.complete(
        prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        user="one conversation",
    )
    output = answer["choices"][0]["token_ids"]
    assert len(output) == ANSWER_TOKENS
    judge(model, prompt, output)
    return output, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def lose_the_context_worker(direct: DirectCluster, client: Client, model: ReferenceModel) -> None:
    """The router sends the next turn elsewhere and says who has the prefix."""
    prompt = random_tokens(300, 7)
    before = client.by_instance("pageferry_worker_prefill_tokens")
    answer, cached = ask(client, model, prompt)
    assert cached == 0
    client.wait_quiet()
    after = client.by_instance("pageferry_worker_prefill_tokens")
    (used,) = [name for name in ("a", "b") if after[name] > before[name]]
    other = "b" if used == "a" else "a"
    pulled = client.by_instance("pageferry_pulled_tokens")[other]
    direct.workers[used].kill()
    direct.forget(used)
    prompt = [*prompt, *answer, *random_tokens(60, 8)]
    _, cached = ask(client, model, prompt)
    # The answer comes along, though the router knew of the prompt only.
    assert cached == (300 + ANSWER_TOKENS - 1) // BLOCK * BLOCK
    client.wait_quiet()
    assert client.by_instance("pageferry_pulled_tokens")[other] == pulled + cached
    assert client.by_instance("pageferry_prefix_pulls_served")["generation"] == 2
    assert not any(client.by_instance("pageferry_prefix_pulls_failed").values())
    assert not any(client.by_instance("pageferry_worker_quarantined_blocks").values())


def test_conversations_move_between_context_workers(tiny_models: TinyModels) -> None:
    path, tokenizer = tiny_models("gemma3_text")
    model = ReferenceModel(path)
    with direct_cluster(path, tokenizer) as direct:

        def start(name: str) -> None:
            direct.start_worker(
                name,
                "generation" if name == "generation" else "context",
                tokens_per_block=BLOCK,
                kv_cache_bytes=2_000_000,
                max_batch_tokens=32,
                least_pull_tokens=BLOCK,
            )

        with ThreadPoolExecutor() as pool:
            list(pool.map(start, ("a", "b", "generation")))
        asyncio.run(talk(direct, model))
        lose_the_context_worker(direct, direct.start_front_end(), model)
