"""A service whose instances have two ranks: those of the context instance prefill prompts of their
own, and one of the generation instance's is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import TinyModels
from tests.support.launched_service import LaunchedService
from tests.support.oracle import ReferenceModel, check_equal
from worker.messages import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(180)]

OUTPUT_TOKENS = 60
GONE_S = 5.0
RESTART_S = 60.0
PROMPT = [int(token) for token in range(40, 90)]


@pytest.fixture(scope="module")
def ranks(tiny_models: TinyModels) -> Iterator[LaunchedService]:
    model, _ = tiny_models("llama")
    shared = ("--context-attention-dp-size", "2", "--generation-tensor-parallel-size", "2")
    options = ("--device", "cpu", "--torch-threads", "1", "--kv-cache-bytes", "16MiB")
    admission = ("--dp-admission", "kv_balanced")
    with LaunchedService(model, *shared, *options, *admission) as launched:
        yield launched


def generation_follower(service: LaunchedService) -> psutil.Process:
    """The one rank of its role whose process the launcher has not named."""
    leaders = {pids[-1] for pids in service.pids.values()}
    found = [
        process
        for process in service.descendants()
        if process.name().startswith("ray::RankActor")
        and process.pid not in leaders
        and process.environ()["PAGEFERRY_ROLE"] == "generation"
    ]
    assert len(found) == 1, found
    return found[0]


def test_prompts_of_both_context_ranks(ranks: LaunchedService, tiny_models: TinyModels) -> None:
    """More at once than one rank alone takes first; each is decoded from pages that came."""
    reference = ReferenceModel(tiny_models("llama")[0])
    client = Client(ranks.url)
    client.wait_ready(RESTART_S)
    prompts = [PROMPT[: 20 + 7 * count][::-1] for count in range(4)]

    def ask(prompt: list[int]) -> list[int]:
        got = client.complete(
            prompt, max_tokens=8, temperature=0.0, ignore_eos=True, return_token_ids=True
        )
        tokens: list[int] = got["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(ask, prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        report = check_equal(reference, prompt, output, SamplingParams(temperature=0.0))
        assert report.ok, report
    assert client.total("pageferry_repairs") == 0
    client.http.close()


def test_a_killed_rank_takes_its_instance_along_and_one_new_one_comes(
    ranks: LaunchedService, tiny_models: TinyModels
) -> None:
    reference = ReferenceModel(tiny_models("llama")[0])
    client = Client(ranks.url)
    client.wait_ready(RESTART_S)
    body = {
        "prompt": PROMPT,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    leader, follower = psutil.Process(ranks.pid("generation-0")), generation_follower(ranks)
    incarnation = client.incarnation("generation-0")

    def kill(choice: int, delta: int) -> None:
        if delta == 3:
            os.kill(follower.pid, signal.SIGKILL)

    got = client.stream("/v1/completions", on_delta=kill, **body)
    _, alive = psutil.wait_procs([leader, follower], GONE_S)
    assert not alive
    assert got.error is None, got.error
    ranks.wait_restarted("generation-0", leader.pid, RESTART_S)
    client.wait_back("generation-0", incarnation, RESTART_S)
    assert len(ranks.pids["generation-0"]) == 2
    assert generation_follower(ranks).pid != follower.pid
    again = client.complete(PROMPT, **{key: body[key] for key in body if key != "prompt"})
    for output in (got.choices[0].token_ids, again["choices"][0]["token_ids"]):
        assert len(output) == OUTPUT_TOKENS
        report = check_equal(reference, PROMPT, output, SamplingParams(temperature=0.0))
        assert report.ok, report
    client.http.close()
