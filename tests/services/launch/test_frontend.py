"""The front end as the process it is in production, over fake workers and a tiny tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.errors import StartError
from services.frontend_process import FrontEndProcess, bind
from services.membership import LAUNCHER_CODEC, FrontEndSettings, MembershipUpdate
from services.serve import ask_ready
from tests.support.fake_tokens import FAKE_VOCAB_SIZE
from tests.support.fake_worker import FAKE_TOKEN, FakeScript, FakeTransfers, FakeWorker
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, EOS, byte_level_tokenizer, token_id
from worker.config import WorkerAddress

START_BOUND_S = 4.0
"""Twice the promise of two seconds: this machine may be doing other things."""


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    facts = {
        "eos_token_ids": [token_id(tokenizer, EOS)],
        "max_position_tokens": 4096,
        "vocab_size": FAKE_VOCAB_SIZE,
        "model_name": "fake-model",
    }
    (folder / "generation.json").write_text(json.dumps(facts))
    return folder


def settings(tokenizer_folder: Path, **changes: Any) -> FrontEndSettings:
    values: dict[str, Any] = {
        "model": "fake-model",
        "tokenizer_directory": str(tokenizer_folder),
        "listen_fd": None,
        "host": "127.0.0.1",
        "port": 0,
        "cluster_token": FAKE_TOKEN,
        "expected_instances": ("context-0", "generation-0"),
        "request_timeout_ms": 30_000,
        "drain_timeout_ms": 5_000,
        "log_level": "warning",
    }
    return FrontEndSettings(**values | changes)


@contextlib.asynccontextmanager
async def workers(script: FakeScript | None = None) -> AsyncIterator[tuple[WorkerAddress, ...]]:
    transfers = FakeTransfers()
    async with (
        FakeWorker("context-0", "context", transfers=transfers, script=script) as context,
        FakeWorker("generation-0", "generation", transfers=transfers, script=script) as generation,
    ):
        yield context.address(), generation.address()


@dataclass
class Raw:
    """A front end started by hand, so that its frames and output are seen as they are."""

    process: asyncio.subprocess.Process
    url: str

    def tell(self, message: FrontEndSettings | MembershipUpdate) -> None:
        assert self.process.stdin is not None
        LAUNCHER_CODEC.write(self.process.stdin, [message])

    async def ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.url) as client:
            await poll(lambda: _status(client, 200))


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask another process until it says yes; the test's own timeout bounds it."""
    while not await condition():  # noqa: ASYNC110  the other process sets no event here
        await asyncio.sleep(0.02)


async def _status(client: httpx.AsyncClient, expected: int) -> bool:
    return (await client.get("/ready")).status_code == expected


async def _degraded(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/ready")).json()["degraded"])


async def spawn(*command: str, errors: int | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
    )


@contextlib.asynccontextmanager
async def raw_front_end(first: FrontEndSettings, *command: str) -> AsyncIterator[Raw]:
    process = await spawn(*(command or ("-P", "-m", "services.frontend")))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        LAUNCHER_CODEC.write(process.stdin, [first])
        event = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert (event["event"], event["pid"]) == ("listening", process.pid)
        yield Raw(process, event["url"])
    finally:
        process.stdin.close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


# Runs the module as `-m` does, then says which of the heavy packages are loaded.
SPY = """
import atexit, runpy, sys
names = ("torch", "transformers", "ray", "ucxx")
atexit.register(lambda: print("loaded", [n for n in names if n in sys.modules], flush=True))
runpy.run_module("services.frontend", run_name="__main__")
"""


async def test_serves_a_chat_without_loading_torch(tokenizer_folder: Path) -> None:
    command = ("-P", "-c", SPY)
    async with (
        workers() as addresses,
        raw_front_end(settings(tokenizer_folder), *command) as front_end,
    ):
        front_end.tell(MembershipUpdate(workers=addresses))
        await asyncio.wait_for(front_end.ready(), 20)
        async with httpx.AsyncClient(base_url=front_end.url) as client:
            answer = await client.post(
                "/v1/chat/completions",
                json={
                    "model": "fake-model",
                    "messages": [{"role": "user", "content": "hello"}],
                    "max_tokens": 4,
                    "temperature": 0,
                },
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
        assert front_end.process.stdin is not None
        assert front_end.process.stdout is not None
        front_end.process.stdin.close()
        line = await asyncio.wait_for(front_end.process.stdout.readline(), 15)
        assert line.decode().strip() == "loaded []"
        assert await front_end.process.wait() == 0


async def test_starts_fast(tokenizer_folder: Path) -> None:
    started = time.monotonic()
    async with raw_front_end(settings(tokenizer_folder)):
        assert time.monotonic() - started < START_BOUND_S


async def test_not_ready_says_what_is_missing_and_follows_membership(
    tokenizer_folder: Path,
) -> None:
    async with workers() as (context, generation), raw_front_end(settings(tokenizer_folder)) as raw:
        port = int(raw.url.rsplit(":", 1)[1])
        state = await asyncio.to_thread(ask_ready, "127.0.0.1", port)
        assert "context-0" in state
        assert "generation-0" in state
        raw.tell(MembershipUpdate(workers=(context, generation)))
        await asyncio.wait_for(raw.ready(), 20)
        raw.tell(MembershipUpdate(workers=(context,)))
        async with httpx.AsyncClient(base_url=raw.url) as client:
            await poll(lambda: _degraded(client))
            answer = await client.get("/ready")
            assert answer.status_code == 200, "the other worker serves alone"
            assert answer.json()["reasons"] == ["no generation worker is ready"]
            raw.tell(MembershipUpdate(workers=()))
            await poll(lambda: _status(client, 503))
            answer = await client.get("/ready")
            assert "generation" in " ".join(answer.json()["reasons"])


async def test_end_of_input_drains_what_is_in_flight(tokenizer_folder: Path) -> None:
    script = FakeScript(step_s=0.05)
    async with workers(script) as addresses, raw_front_end(settings(tokenizer_folder)) as raw:
        raw.tell(MembershipUpdate(workers=addresses))
        await asyncio.wait_for(raw.ready(), 20)
        assert raw.process.stdin is not None
        body = {"model": "fake-model", "prompt": "the", "max_tokens": 20, "stream": True}
        async with (
            httpx.AsyncClient(base_url=raw.url, timeout=20) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            raw.process.stdin.close()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(raw.process.wait(), 10) == 0


async def test_garbage_instead_of_settings_is_a_clear_error() -> None:
    process = await spawn("-P", "-m", "services.frontend", errors=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(b"hello, front end"), 30)
    assert process.returncode == 1
    assert b"started by `pageferry serve`" in errors
    assert b"Traceback" not in errors


class Kept:
    """A front end kept by the launcher's own shell."""

    def __init__(self, tokenizer_folder: Path, **changes: Any) -> None:
        self.listener = bind("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        changes |= {"listen_fd": self.listener.fileno(), "port": self.port}
        self.process = FrontEndProcess(self.listener)
        self.settings = settings(tokenizer_folder, **changes)
        self.url = f"http://127.0.0.1:{self.port}"

    async def pid(self) -> int:
        """Of the process that answers now."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            assert (await client.get("/health")).status_code == 200
        assert self.process.pid is not None
        return self.process.pid


async def test_a_crashed_front_end_is_replaced_on_the_same_port_and_knows_the_workers(
    tokenizer_folder: Path,
) -> None:
    kept = Kept(tokenizer_folder)
    task = asyncio.create_task(kept.process.run(kept.settings))
    async with workers() as addresses:
        kept.process.publish(addresses)
        await asyncio.wait_for(kept.process.listening(), 30)
        first = await kept.pid()
        os.kill(first, signal.SIGKILL)
        # The connection waits in the queue of the socket, which outlives the process.
        second = await kept.pid()
        assert second != first
        async with httpx.AsyncClient(base_url=kept.url) as client:
            await poll(lambda: _status(client, 200))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(httpx.ConnectError):
        await kept.pid()


async def test_a_front_end_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "no tokenizer here")
    with pytest.raises(StartError, match="ended with exit code 1 before it listened"):
        await kept.process.run(kept.settings)
    kept.listener.close()


def test_a_port_that_is_taken_is_an_error() -> None:
    taken = bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(StartError, match="choose another --port"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


async def test_a_port_that_another_service_listens_on_first_is_a_clear_error(
    tokenizer_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Two sockets may be bound to one port as long as neither listens.
    kept = Kept(tokenizer_folder)
    with (
        contextlib.closing(bind("127.0.0.1", kept.port)) as first,
        contextlib.closing(kept.listener),
    ):
        first.listen()
        with pytest.raises(StartError, match="ended with exit code 1 before it listened"):
            await kept.process.run(kept.settings)
    errors = capfd.readouterr().err
    assert f"cannot listen on 127.0.0.1:{kept.port}: " in errors
    assert "Traceback" not in errors


async def test_what_is_not_done_when_draining_ends_gets_an_error_in_the_usual_shape(
    tokenizer_folder: Path,
) -> None:
    script = FakeScript(step_s=0.2)
    first = settings(tokenizer_folder, drain_timeout_ms=500)
    async with workers(script) as addresses, raw_front_end(first) as raw:
        raw.tell(MembershipUpdate(workers=addresses))
        await asyncio.wait_for(raw.ready(), 20)
        assert raw.process.stdin is not None
        body = {"model": "fake-model", "prompt": "the", "max_tokens": 500}
        async with httpx.AsyncClient(base_url=raw.url, timeout=20) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await poll(lambda: _in_flight(client))
            raw.process.stdin.close()
            answer = await asked
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert await asyncio.wait_for(raw.process.wait(), 10) == 0


async def _in_flight(client: httpx.AsyncClient) -> bool:
    lines = (await client.get("/metrics")).text.splitlines()
    return "pageferry_http_in_flight 2.0" in lines
