"""The launcher end to end: what it starts, what it starts again, and that it leaves nothing behind.

Suite budget: 150 s beside the session's cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.client import Client
from tests.support.launched_service import LaunchedService, alive

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(300)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
HEAVY = ("libtorch", "ucxx", "libucp", "_raylet", "/transformers/")


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those of ``processes`` that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_the_official_client_streams_a_sensible_answer(service: LaunchedService) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as official:
        stream = official.chat.completions.create(
            model=official.models.list().data[0].id,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len([part for part in parts if part]) > 1
    assert "Paris" in "".join(parts)


def test_pages_travelled_and_the_generation_worker_prefilled_nothing(
    service: LaunchedService, client: Client
) -> None:
    """By every way to ask."""
    client.wait_quiet()
    question = f"{time.time_ns()} is the number of the day. Tell me about it."
    ways: list[Callable[[], object]] = [
        lambda: client.chat([{"role": "user", "content": question}], max_tokens=4),
        lambda: client.complete(question, max_tokens=4),
        lambda: client.complete(list(range(100, 120)), max_tokens=4, cache_salt=question),
    ]
    computed = client.by_instance("pageferry_worker_prefill_tokens")["generation-0"]
    for ask in ways:
        sent = client.by_instance("pageferry_transferred_bytes")["generation-0"]
        ask()
        client.wait_quiet()
        client.wait_above("pageferry_transferred_bytes", "generation-0", sent)
    assert client.by_instance("pageferry_worker_prefill_tokens")["generation-0"] == computed


def test_a_front_end_that_has_served_a_chat_holds_nothing_heavy(
    service: LaunchedService, client: Client
) -> None:
    client.chat(QUESTION, temperature=0, max_tokens=4)
    mapped = Path(f"/proc/{service.front_end().pid}/maps").read_text()
    assert "tokenizers" in mapped, "the right process, with its libraries mapped"
    assert [name for name in HEAVY if name in mapped] == []


def test_a_killed_front_end_is_back_on_the_same_port(
    service: LaunchedService, client: Client
) -> None:
    workers = dict(service.pids)
    service.front_end().kill()
    client.wait_ready(30)
    assert "Paris" in client.chat(QUESTION, temperature=0)["choices"][0]["message"]["content"]
    assert service.pids == workers


ENDS = (signal.SIGTERM, signal.SIGKILL)


@pytest.fixture(scope="module")
def to_be_ended(smollm2: Path) -> Iterator[dict[signal.Signals, LaunchedService]]:
    """A service for each way to end. They start at once, as one start leaves a core idle."""
    arguments = ("--aggregated", "--kv-cache-bytes", "64MiB", "--device", "cpu")
    services = {how: LaunchedService(smollm2, *arguments) for how in ENDS}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for service in services.values():
            stack.push(service)  # closed whichever starts
        list(pool.map(LaunchedService.__enter__, services.values()))
        yield services


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_when_the_launcher_ends(
    to_be_ended: dict[signal.Signals, LaunchedService], how: signal.Signals
) -> None:
    """Even when the kernel kills it, and with a worker that is stopped and hears nothing."""
    launched = to_be_ended[how]
    below = launched.descendants()
    assert len(below) > 3
    os.kill(launched.pid("aggregated-0"), signal.SIGSTOP)
    launched.process.send_signal(how)
    code = launched.process.wait(30)
    assert wait_gone(below, 5.0) == []
    assert code == (0 if how is signal.SIGTERM else -9)
