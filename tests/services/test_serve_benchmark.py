"""benchmarks.serve beside an OpenAI-style peer: both get the same work and take turns."""

from __future__ import annotations

import json
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typing_extensions import override

from benchmarks import serve
from benchmarks.endpoint import discover, named_url
from benchmarks.serve_figures import beside, unequal_prompts

Bodies = list[tuple[str, dict[str, Any]]]
TEXTS = ["what is a ferry", "what is a page", "what is a block"]


@contextmanager
def service(name: str, seen: Bodies) -> Iterator[str]:
    """A service that answers chats with as many tokens as are wanted, and its address."""

    class Handler(BaseHTTPRequestHandler):
        @override
        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            self._answer("application/json", json.dumps({"data": [{"id": f"{name}-model"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((name, body))
            words = len(body["messages"][0]["content"].split())
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": words}
            delta = {"choices": [{"delta": {"content": "a"}}]}
            events: list[dict[str, Any]] = [delta] * int(body["max_tokens"])
            events.append({"choices": [], "usage": usage})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

        def _answer(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def measured(ours: str, peer: str) -> Any:
    load = ["--concurrency", "1", "2", "--requests=1", "--rounds=2", "--output-tokens=3"]
    given = serve.parse([*load, f"--peer-url=other={peer}/v1/"])
    sides = {
        "disaggregated": discover("ours", ours),
        **{name: discover(name, url) for name, url in given.peer_url},
    }
    return serve.measure(given, sides, TEXTS)


def test_a_peer_gets_the_same_requests_in_turn() -> None:
    seen: Bodies = []
    with service("ours", seen) as ours, service("peer", seen) as peer:
        modes = measured(ours, peer)
    asked: dict[str, list[Any]] = {"ours": [], "peer": []}
    for name, body in seen:
        assert body.pop("model") == f"{name}-model"
        asked[name].append(sorted(body.items(), key=lambda item: item[0]))
    for name, bodies in asked.items():
        assert len(bodies) == 2 + 2 * (1 + 2), name  # a load that warms up, two rounds
    assert sorted(map(str, asked["ours"])) == sorted(map(str, asked["peer"]))
    body = dict(asked["peer"][-1])
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0, True)
    turns = [name for name, _ in seen[4:]]
    assert turns == ["ours", "peer", "ours", "ours", "peer", "peer"] * 2
    assert modes["other"]["concurrency"]["2"]["requests"] == 4
    found = beside(modes, ["other"])
    assert found.keys() == {"disaggregated_at_1_over_other", "disaggregated_at_2_over_other"}
    assert found["disaggregated_at_2_over_other"]["output_tokens_per_s"] > 0
    assert unequal_prompts(modes) == []


def test_another_template_is_told() -> None:
    def side(prompt_tokens: int) -> dict[str, Any]:
        return {"concurrency": {"8": {"prompt_tokens": prompt_tokens}}}

    modes = {"aggregated": side(20), "same": side(20), "other": side(27)}
    assert unequal_prompts(modes) == ["at 8: 27 prompt tokens at other, 20 at aggregated"]


def test_ratios_are_ours_over_the_peers() -> None:
    def side(rate: float, ttft: float, itl: float) -> dict[str, Any]:
        row = {"output_tokens_per_s": rate, "ttft_ms": {"p50": ttft}, "itl_ms": {"p50": itl}}
        return {"concurrency": {"8": row}}

    modes = {"aggregated": side(90, 30, 4), "vllm": side(100, 20, 5)}
    assert beside(modes, ["vllm"]) == {
        "aggregated_at_8_over_vllm": {"output_tokens_per_s": 0.9, "ttft_ms": 1.5, "itl_ms": 0.8}
    }


def test_an_address_is_a_name_and_a_url() -> None:
    assert named_url("vllm=http://host:8000/v1/") == ("vllm", "http://host:8000")
    for wrong in ("http://host:8000", "=http://host", "vllm=host:8000"):
        with pytest.raises(ArgumentTypeError, match="NAME=http"):
            named_url(wrong)
    with pytest.raises(SystemExit):
        serve.parse(["--peer-url", "aggregated=http://host:8000"])


def test_a_peer_that_is_not_up_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"expected sglang to list its models .* is it up"):
        discover("sglang", "http://127.0.0.1:9")
