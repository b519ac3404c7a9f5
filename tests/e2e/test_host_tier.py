"""A working set three times the device pools, served in a loop with host memory below them.

Every answer equals the oracle, and what a later round needs comes back from the host instead of
being computed again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.e2e.direct import WorkerStart, direct_cluster
from tests.support.launched_service import LaunchedService
from tests.support.oracle import ReferenceModel, check_equal
from worker.messages import SamplingParams

ROUNDS = 3
OUTPUT_TOKENS = 5


def prompts_of(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[(31 * n + i * (n + 7)) % vocabulary for i in range(tokens)] for n in range(count)]


def serve_in_a_loop(
    client: Client, reference: ReferenceModel, prompts: list[list[int]], block: int
) -> None:
    """ROUNDS times all prompts, one after the other, each judged; then what the workers count."""
    judged: set[tuple[int, ...]] = set()
    found = host_before = 0
    for turn in range(ROUNDS):
        for prompt in prompts:
            answer = client.complete(
                prompt,
                max_tokens=OUTPUT_TOKENS,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            output = answer["choices"][0]["token_ids"]
            assert len(output) == OUTPUT_TOKENS
            if (*prompt, *output) not in judged:
                report = check_equal(reference, prompt, output, SamplingParams(temperature=0))
                assert report.ok, report
                judged.add((*prompt, *output))
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if not turn:
                assert cached == 0
                continue
            # The last token is always computed, for its logits.
            assert cached >= (len(prompt) - 1) // block * block
            found += cached
        client.wait_quiet()
        if turn:
            host = client.by_instance("pageferry_worker_host_cached_tokens")["context-0"]
            assert host > host_before
            host_before = int(host)
    assert found >= 0.9 * (ROUNDS - 1) * sum(map(len, prompts))
    # Of three prompts in a loop two are always on the host when their turn comes.
    assert host_before >= 0.6 * found
    for name in ("context-0", "generation-0"):
        cached = client.by_instance("pageferry_worker_cached_tokens")[name]
        assert 0 < client.by_instance("pageferry_worker_host_cached_tokens")[name] <= cached
        assert client.by_instance("pageferry_worker_demoted_pages")[name] > 0
        assert client.by_instance("pageferry_worker_evicted_pages")[name] == 0
        assert client.by_instance("pageferry_worker_onboarded_pages")[name] > 0


@pytest.mark.ucx
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_three_times_the_pools(tiny_models: TinyModels, family: str) -> None:
    model, tokenizer = tiny_models(family)
    block, prompt_blocks = 16, 6
    with direct_cluster(model, tokenizer) as cluster:
        settings = {
            "tokens_per_block": block,
            "max_batch_tokens": 4 * block,
            "max_sequence_tokens": 8 * block,
            "kv_cache_bytes": 256 << 10,
            "host_cache_bytes": 2 << 20,
        }
        cluster.start_workers(
            WorkerStart("context-0", "context", settings),
            WorkerStart("generation-0", "generation", settings),
        )
        client = cluster.start_front_end()
        blocks = int(max(client.by_instance("pageferry_worker_total_blocks").values()))
        assert 2 * prompt_blocks <= blocks <= 64
        prompts = prompts_of(3 * blocks // prompt_blocks, prompt_blocks * block - 8, 250)
        serve_in_a_loop(client, ReferenceModel(model), prompts, block)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.ucx
@pytest.mark.timeout(900)
def test_three_times_the_pools_with_the_default_model(smollm2: Path) -> None:
    # 64 tokens of 30 layers, K and V, 3 heads of 64 in float32.
    block, blocks = 64, 24
    size = blocks * block * 30 * 2 * 3 * 64 * 4
    options = ("--kv-cache-bytes", str(size), "--host-cache-bytes", str(8 * size))
    with LaunchedService(smollm2, *options, "--device", "cpu") as service:
        client = Client(service.url)
        prompts = prompts_of(3 * blocks // 6, 6 * block - 8, 40_000)
        serve_in_a_loop(client, ReferenceModel(smollm2), prompts, block)
