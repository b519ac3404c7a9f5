"""What the end-to-end tests say to the service: requests as a client would send them, and what it
says of itself.

Everything goes through HTTP. Page counts and totals come from ``/metrics``, so what operators
see is what is asserted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

QUIET_TIMEOUT_S = 20.0


@dataclass
class StreamedChoice:
    """What one choice of a stream amounted to."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Streamed:
    """A whole stream, taken apart."""

    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    first_token_s: float | None = None


def events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """The JSON events of an SSE response; None stands for ``[DONE]``."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            payload = line[len("data: ") :]
            yield None if payload == "[DONE]" else json.loads(payload)


class Client:
    """A client of one running service."""

    def __init__(self, url: str) -> None:
        self.url = url
        details = {"x-pageferry-details": "1"}
        self.http = httpx.Client(base_url=url, timeout=120, headers=details)
        self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One chat completion, not streamed; asserts status 200."""
        return self.post("/v1/chat/completions", messages=messages, **fields)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One completion, not streamed; asserts status 200."""
        return self.post("/v1/completions", prompt=prompt, **fields)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json={"model": self.model, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(
        self, path: str, on_delta: Callable[[int, int], None] | None = None, **body: Any
    ) -> Streamed:
        """Read a whole stream. ``on_delta(choice, number)`` is called after each delta that carries
        text.
        """
        streamed = Streamed()
        started = time.monotonic()
        number = 0
        request = {"model": self.model, "stream": True, **body}
        with self.http.stream("POST", path, json=request) as response:
            assert response.status_code == 200, response.read()
            for event in events(response):
                if event is None:
                    streamed.done = True
                    continue
                if "error" in event:
                    streamed.error = event["error"]
                    continue
                if event.get("usage"):
                    streamed.usage = event["usage"]
                for part in event["choices"]:
                    choice = streamed.choices.setdefault(part["index"], StreamedChoice())
                    text = part["delta"].get("content") if "delta" in part else part["text"]
                    if part.get("finish_reason"):
                        choice.finish_reason = part["finish_reason"]
                    choice.token_ids += part.get("token_ids") or ()
                    if part.get("logprobs"):
                        choice.logprobs.append(part["logprobs"])
                    if text:
                        if streamed.first_token_s is None:
                            streamed.first_token_s = time.monotonic() - started
                        choice.text += text
                        number += 1
                        if on_delta is not None:
                            on_delta(part["index"], number)
        return streamed

    def leave(self, path: str, patience_s: float, deltas: int, **body: Any) -> int:
        """Read a stream, and close its connection after so many deltas, or when none came for
        ``patience_s``; the deltas read.
        """
        timeout = httpx.Timeout(60, read=max(patience_s, 1e-3))
        request = {"model": self.model, "stream": True, **body}
        seen = 0
        try:
            with self.http.stream("POST", path, json=request, timeout=timeout) as response:
                for event in events(response):
                    seen += event is not None
                    if seen >= deltas:
                        break
        except httpx.ReadTimeout:
            pass
        return seen

    def ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def whole(self) -> bool:
        """Whether it is ready and no worker is away."""
        try:
            answer = self.http.get("/ready")
        except httpx.TransportError:
            return False
        body = answer.json()
        workers_ready = all(worker["ready"] for worker in body["workers"])
        return answer.status_code == 200 and not body["degraded"] and workers_ready

    def incarnation(self, instance: str) -> str:
        """Of the instance as the front end sees it; empty while it is away or not ready."""
        for worker in self.http.get("/ready").json()["workers"]:
            if worker["instance"] == instance and worker["ready"]:
                return str(worker["incarnation"])
        return ""

    def wait_back(self, instance: str, old: str, timeout_s: float) -> None:
        """Wait until another incarnation than ``old`` takes requests and the service is whole."""
        started = time.monotonic()
        while self.incarnation(instance) in ("", old):
            assert time.monotonic() - started < timeout_s, f"{instance} is not back"
            time.sleep(0.1)
        self.wait_ready(timeout_s - (time.monotonic() - started))

    def wait_gone(self, instance: str, old: str, timeout_s: float) -> None:
        """Wait until the front end knows that this incarnation takes no requests any more."""
        started = time.monotonic()
        while self.incarnation(instance) == old:
            assert time.monotonic() - started < timeout_s, f"{instance} is still there"
            time.sleep(0.01)

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds until ``/ready`` says yes and no worker is away."""
        started = time.monotonic()
        while not self.whole():
            waited = time.monotonic() - started
            assert waited < timeout_s, (
                f"not ready after {waited:.0f} s: {self.http.get('/ready').text}"
            )
            time.sleep(0.1)
        return time.monotonic() - started

    def families(self) -> dict[str, Metric]:
        """All metrics of ``/metrics`` by name."""
        text = self.http.get("/metrics").text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def total(self, name: str) -> float:
        """Sum of a counter or gauge over all labels; 0 while it has no sample, an error when
        there is no such metric.
        """
        family = self.families()[name]
        wanted = f"{name}_total" if family.type == "counter" else name
        return sum(sample.value for sample in family.samples if sample.name == wanted)

    def by_instance(self, name: str) -> dict[str, float]:
        """A worker metric by instance."""
        return {sample.labels["instance"]: sample.value for sample in self.families()[name].samples}

    def wait_above(self, name: str, instance: str, before: float, timeout_s: float = 10.0) -> None:
        """Wait until a worker metric is above ``before``: a worker's reports come now and then."""
        started = time.monotonic()
        while (now := self.by_instance(name)[instance]) <= before:
            assert time.monotonic() - started < timeout_s, f"{name} of {instance} stays at {now}"
            time.sleep(0.1)

    def free_blocks(self) -> dict[str, float]:
        """Blocks that nothing holds, by instance."""
        return self.by_instance("pageferry_worker_free_blocks")

    def wait_quiet(self, timeout_s: float = QUIET_TIMEOUT_S) -> None:
        """Wait until no request, sequence or transfer is in flight anywhere."""
        names = (
            "pageferry_requests_in_flight",
            "pageferry_worker_running",
            "pageferry_worker_waiting",
            "pageferry_worker_transfers_in_flight",
        )
        deadline = time.monotonic() + timeout_s
        calm = 0
        while calm < 2:
            families = self.families()
            busy = [s for name in names for s in families[name].samples if s.value]
            calm = 0 if busy else calm + 1
            assert time.monotonic() < deadline, f"still busy after {timeout_s} s: {busy}"
            time.sleep(0.3)
