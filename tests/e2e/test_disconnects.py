"""Clients that go away: their requests stop, their pages return, nothing else notices."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.timeout(600)]

REQUESTS = 200
AT_ONCE = 16


def leave(client: Client, number: int, rng: random.Random) -> None:
    """Send a request and close the connection after a random time."""
    streaming = rng.random() < 0.5
    patience_s = rng.choice([0.0, 0.005, 0.02, 0.1, 0.3, 0.8])
    body = {
        "model": client.model,
        "messages": [
            {"role": "user", "content": f"{number}: " + "count upwards, " * (number % 40)}
        ],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": streaming,
    }
    timeout = httpx.Timeout(30, read=max(patience_s, 1e-3))
    try:
        with (
            httpx.Client(base_url=client.url, timeout=timeout) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            deadline = time.monotonic() + patience_s
            for _ in response.iter_bytes():
                if time.monotonic() > deadline:
                    return
    except httpx.ReadTimeout:
        return


def stay(client: Client, number: int) -> int:
    answer = client.chat(
        [{"role": "user", "content": f"{number}: say something short."}],
        max_tokens=6,
        ignore_eos=True,
        temperature=0,
    )
    completion: int = answer["usage"]["completion_tokens"]
    return completion


def test_half_of_two_hundred_clients_leave(client: Client) -> None:
    client.wait_quiet()
    free_before = client.free_blocks()
    rng = random.Random(20)
    lock = threading.Lock()
    stayed: list[int] = []

    def one(number: int) -> None:
        if number % 2:
            leave(client, number, random.Random(number))
        else:
            counted = stay(client, number)
            with lock:
                stayed.append(counted)

    order = list(range(REQUESTS))
    rng.shuffle(order)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, order))
    assert stayed == [6] * (REQUESTS // 2)
    client.wait_quiet()
    assert client.free_blocks() == free_before
    assert client.total("pageferry_requests_in_flight") == 0
    assert client.ready()
    assert stay(client, REQUESTS) == 6
