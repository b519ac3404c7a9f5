"""Clusters with something in the way: a burst, a slow connection, a tiny pool. Workers run without
Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bursts import Burst
from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.e2e.direct import DirectCluster, WorkerStart, direct_cluster
from tests.e2e.health_watch import health_watch
from tests.support.oracle import ReferenceModel, check_equal
from worker.messages import SamplingParams

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

DELAY_S = 0.5
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tiny_models: TinyModels) -> tuple[Path, Path]:
    return tiny_models("llama")


@pytest.fixture(scope="module")
def roomy(tiny: tuple[Path, Path]) -> Iterator[DirectCluster]:
    """Two workers with room for twenty long prompts each."""
    settings = {"tokens_per_block": BLOCK, "max_batch_tokens": 4 * BLOCK, "kv_cache_bytes": 8 << 20}
    with direct_cluster(*tiny) as cluster:
        cluster.start_workers(
            WorkerStart("context-0", "context", settings),
            WorkerStart("generation-0", "generation", settings),
        )
        yield cluster


def test_a_burst_of_long_prompts_of_which_half_are_left(
    tiny: tuple[Path, Path], roomy: DirectCluster
) -> None:
    """At any moment of queue, prefill, transfer and decode."""
    client = roomy.start_front_end()
    client.wait_quiet()
    free_before = client.free_blocks()
    with health_watch(client.url) as seen:
        served = Burst(seed=10, requests=64, leaving=32, patience_s=4.0).run(client)
        client.wait_quiet()
    assert client.free_blocks() == free_before
    assert not any(client.by_instance("pageferry_worker_quarantined_blocks").values())
    assert client.total("pageferry_requests_in_flight") == 0
    assert seen.complaints == []
    assert max(seen.health_s) < 1.0
    assert len(served.answers) == 32
    assert served.left_waiting > 3
    assert served.left_decoding > 3
    served.judge(ReferenceModel(tiny[0]))
    assert client.total("pageferry_repairs") == 0


def test_token_one_comes_first_and_once_over_a_slow_context_connection(
    tiny: tuple[Path, Path], roomy: DirectCluster
) -> None:
    reference = ReferenceModel(tiny[0])
    with roomy.slowed_down("context-0", DELAY_S):
        client = roomy.start_front_end()
        for number in range(8):
            prompt = f"Sentence number {number} goes here."
            body: dict[str, Any] = {
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            got = client.stream("/v1/completions", **body)
            assert got.done
            output = got.choices[0].token_ids
            assert len(output) == 12
            whole = client.complete(**body)["choices"][0]
            assert whole["token_ids"] == output
            report = check_equal(
                reference, whole["prompt_token_ids"], output, SamplingParams(temperature=0)
            )
            assert report.ok, report
            assert got.first_token_s is not None
            # The hand-over carries token 1 too, so it does not wait for the slow connection.
            assert got.first_token_s < DELAY_S
        assert client.total("pageferry_token_conflicts") == 0


def lanes_of(client: Client) -> set[str]:
    """Of all pairs, missing ones included."""
    return {pair.labels["lane"] for pair in client.families()["pageferry_transfer_pairs"].samples}


def test_fifty_requests_on_a_decode_pool_of_two_prompts(tiny: tuple[Path, Path]) -> None:
    model, tokenizer = tiny
    reference = ReferenceModel(model)
    prompt_tokens, output_tokens = 6 * BLOCK, BLOCK
    # float32, 3 layers, K and V, 2 heads of 16.
    block_bytes = BLOCK * 3 * 2 * 2 * 16 * 4
    blocks = 2 * (prompt_tokens + output_tokens) // BLOCK
    with direct_cluster(model, tokenizer) as cluster:
        small = {"tokens_per_block": BLOCK, "max_batch_tokens": 2 * BLOCK}
        pool_bytes = blocks * block_bytes
        cluster.start_workers(
            WorkerStart("context-0", "context", {**small, "kv_cache_bytes": 8 << 20}),
            WorkerStart("generation-0", "generation", {**small, "kv_cache_bytes": pool_bytes}),
        )
        client = cluster.start_front_end()
        # Not even the first request, a canary, found its pair unconnected.
        assert client.total("pageferry_transfer_late_dials") == 0
        assert lanes_of(client) == {"shm"}
        client.wait_quiet()
        free_before = client.free_blocks()
        assert free_before["generation-0"] == blocks

        def send(number: int) -> tuple[list[int], list[int]]:
            prompt = [(number * 31 + i * 7) % 250 for i in range(prompt_tokens)]
            answer = Client(client.url).complete(
                prompt,
                max_tokens=output_tokens,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            return prompt, answer["choices"][0]["token_ids"]

        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(send, range(50)))
        for prompt, output in answers:
            assert len(output) == output_tokens
            report = check_equal(reference, prompt, output, SamplingParams(temperature=0))
            assert report.ok, report
        client.wait_quiet()
        assert client.free_blocks() == free_before
        # Two sequences fit with all they will ever need: nothing had to be suspended.
        assert client.total("pageferry_worker_preemptions") == 0
        assert client.total("pageferry_repairs") == 0
