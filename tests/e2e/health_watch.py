"""Asks a service for ``/health`` and ``/ready`` all the time, as a load balancer does.

From a process of its own (``python -m tests.e2e.health_watch URL``), so that what its answers cost
the test that waits for them is not counted as the service's time.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from pydantic import TypeAdapter

POLL_S = 0.05


@dataclass
class Seen:
    """What the service said. Filled in when the watch is over."""

    health_s: list[float] = field(default_factory=list)
    """How long each answer of ``/health`` took."""
    complaints: list[str] = field(default_factory=list)
    """Answers other than 200, and none."""

    def ask(self, http: httpx.Client, path: str) -> None:
        try:
            answer = http.get(path)
        except httpx.TransportError as error:
            self.complaints.append(f"{path}: {error!r}")
        else:
            if answer.status_code != 200:
                self.complaints.append(f"{path}: {answer.text}")


SEEN = TypeAdapter(Seen)


@contextmanager
def health_watch(url: str) -> Iterator[Seen]:
    """Watch during the block."""
    seen = Seen()
    command = [sys.executable, "-m", "tests.e2e.health_watch", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield seen
        told, _ = process.communicate(b"\n", timeout=60)
    found = SEEN.validate_json(told)
    seen.health_s, seen.complaints = found.health_s, found.complaints


def main(url: str) -> None:
    """Until something comes on standard input; then what was seen, as JSON."""
    seen = Seen()
    with httpx.Client(base_url=url, timeout=30) as http:
        print("watching", flush=True)
        while not select.select([sys.stdin], [], [], POLL_S)[0]:
            started = time.monotonic()
            seen.ask(http, "/health")
            seen.health_s.append(time.monotonic() - started)
            seen.ask(http, "/ready")
    print(SEEN.dump_json(seen).decode())


if __name__ == "__main__":
    main(sys.argv[1])
