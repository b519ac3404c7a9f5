"""A context worker that is killed the moment token 1 is out: the answer goes on."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import Judge
from tests.e2e.killed import RESTART_S, assert_complete, request_of
from tests.support.launched_service import LaunchedService

pytestmark = [pytest.mark.ray, pytest.mark.ucx]


def kill_after_first_token(
    service: LaunchedService, client: Client, judge: Judge, number: int
) -> None:
    """Kill the context worker the moment the client has token 1."""
    client.wait_ready(RESTART_S)
    victim, incarnation = service.pid("context-0"), client.incarnation("context-0")
    body = request_of(number, 90)

    def kill(choice: int, delta: int) -> None:
        if delta == 1:
            os.kill(victim, signal.SIGKILL)

    got = client.stream("/v1/completions", on_delta=kill, **body)
    assert_complete(judge, number, body, got)
    service.wait_restarted("context-0", victim, RESTART_S)
    client.wait_back("context-0", incarnation, RESTART_S)


@pytest.mark.timeout(600)
def test_context_worker_dies_right_after_token_one(
    service: LaunchedService, client: Client, smollm2_judge: Judge
) -> None:
    for number in range(5):
        kill_after_first_token(service, client, smollm2_judge, number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_context_worker_dies_right_after_token_one_fifty_times(
    service: LaunchedService, client: Client, smollm2_judge: Judge
) -> None:
    for number in range(50):
        kill_after_first_token(service, client, smollm2_judge, number)
