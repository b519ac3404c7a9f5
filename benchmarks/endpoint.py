"""An OpenAI-style service as a side of a benchmark, ours or anybody's."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from benchmarks import closed_loop

ANSWER_S = 30


@dataclass(frozen=True)
class Endpoint:
    """``url`` without ``/v1``; ``model``: what requests call it by."""

    url: str
    model: str

    def takes(self, concurrency: int) -> bool:
        """Any number."""
        return concurrency > 0

    def load(
        self, texts: Sequence[str], concurrency: int, output_tokens: int
    ) -> closed_loop.LoadResult:
        """Every prompt once, ``concurrency`` at a time."""
        return asyncio.run(closed_loop.run(self.url, self.model, texts, concurrency, output_tokens))


def named_url(text: str) -> tuple[str, str]:
    """``NAME=URL``, as on a command line; a ``/v1`` at its end is left out.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected NAME=http://HOST:PORT, got {text!r}")
    return name, url.rstrip("/").removesuffix("/v1")


def discover(name: str, url: str) -> Endpoint:
    """Asks a service for its model; of several, the first.

    Raises:
        RuntimeError: it gives no list of models, or an empty one.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=ANSWER_S).raise_for_status().json()
    except httpx.HTTPError as error:
        raise RuntimeError(
            f"expected {name} to list its models at {url}/v1/models, got {error!r}: is it up?"
        ) from error
    if not answer["data"]:
        raise RuntimeError(f"expected {name} to serve a model, got an empty list at {url}")
    return Endpoint(url, answer["data"][0]["id"])
