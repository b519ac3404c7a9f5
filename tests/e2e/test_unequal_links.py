"""Clusters with something in the way: a slow connection, a tiny pool. Workers run without Ray."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.e2e.direct import WorkerStart, direct_cluster
from tests.support.oracle import ReferenceModel, check_equal
from worker.messages import SamplingParams

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

DELAY_S = 0.5
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tiny_models: TinyModels) -> tuple[Path, Path]:
    return tiny_models("llama")


def test_token_one_comes_first_and_once_over_a_slow_context_connection(
    tiny: tuple[Path, Path],
) -> None:
    model, tokenizer = tiny
    reference = ReferenceModel(model)
    with direct_cluster(model, tokenizer) as cluster:
        cluster.start_workers(
            WorkerStart("context-0", "context", {"kv_cache_bytes": 8 << 20}),
            WorkerStart("generation-0", "generation", {"kv_cache_bytes": 8 << 20}),
        )
        cluster.slow_down("context-0", DELAY_S)
        client = cluster.start_front_end()
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
