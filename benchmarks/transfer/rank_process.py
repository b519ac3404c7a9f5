"""Runs one rank: a line of JSON with a verb comes in, a line with its answer goes out."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import uvloop

from benchmarks.transfer.context_rank import ContextRank
from benchmarks.transfer.generation_rank import GenerationRank
from benchmarks.transfer.pages import RankSpec

Verb = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


SWITCH_INTERVAL_S: Final = 0.0005
"""As in a worker, whose event loop this process runs too."""


def run(spec: RankSpec) -> None:
    """Until the other end closes standard input."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_serve(spec))


async def _serve(spec: RankSpec) -> None:
    rank: ContextRank | GenerationRank
    if spec.role == "context":
        context = rank = ContextRank(spec)
        verbs = _context_verbs(context)
    else:
        generation = rank = GenerationRank(spec)
        verbs = _generation_verbs(generation)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    started = await rank.start()
    # As in a worker: what is there for good is not looked through again.
    gc.collect()
    gc.freeze()
    _answer(started)
    while line := await reader.readline():
        told = json.loads(line)
        try:
            _answer(await verbs[told["verb"]](told))
        except (RuntimeError, ConnectionError) as error:
            traceback.print_exc()
            _answer({"error": str(error)})
    await rank.close()


def _context_verbs(rank: ContextRank) -> Mapping[str, Verb]:
    return {
        "cpu": cpu,
        "listen": rank.listen,
        "offer": rank.offer,
        "settle": rank.settle,
        "load": rank.load,
        "speed": rank.speed,
        "calm": rank.calm,
    }


def _generation_verbs(rank: GenerationRank) -> Mapping[str, Verb]:
    return {
        "cpu": cpu,
        "dial": rank.dial,
        "raw": rank.raw,
        "grant": rank.grant,
        "fetch": rank.fetch,
        "copy": rank.copy,
        "erase": rank.erase,
        "check": rank.check,
    }


async def cpu(_told: Mapping[str, Any]) -> dict[str, Any]:
    """Processor time of this process so far."""
    return {"cpu_s": time.process_time()}


def _answer(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
