"""A generation rank that obeys orders, in a process of its own: what a test stops and kills.

The process prints its address as JSON. Orders are lines of standard input: ``start ID``,
``cancel ID``, ``soak FIRST COUNT CANCEL_EVERY`` (requests ``soak FIRST`` and so on, one after
another, every so-manyth cancelled at a random moment; 0: none), ``signal NAME ID`` (the process
sends itself this signal at the request's first chunk: from elsewhere it could come after the
last), ``state``. Except in a soak it prints ``ready``, ``chunk``, ``ended`` and ``home`` with the
request's id as they happen. It ends with its standard input.

Free pages are stamped, and taken last in, first out. A page that has lost its stamp while it was
free, or does not hold the context rank's bytes after a success, is a wrong page.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import uvloop

from tests.transfer.agent_rig import HANDOFF, TOKEN, VIEWS, ArrayMemory, lease, rank_info
from tests.transfer.context_process import (
    ContextFacts,
    RankState,
    fill_tokens,
    first_content,
    orders,
)
from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import (
    AgentEvent,
    AnnounceReceived,
    ChunkReceived,
    HandoffReceived,
    LeaseEnded,
    LeaseInDoubt,
    SessionEnded,
)
from transfer.identity import PeerAddress
from transfer.outcome import Outcome
from transfer.ucx.transport import UcxTransport

FREE = 0xA5
"""Stamp of pages that belong to nobody."""
DEADLINE_MS = 20_000
MAX_TURNS = 60
"""Of the event loop, from the start of a request to its cancellation."""


@dataclass(frozen=True)
class GenerationFacts:
    """How the process is set up: as many blocks a request as the context rank has slots."""

    source: ContextFacts
    address: PeerAddress
    requests: int = 1
    """How many may hold pages at once."""
    control_port: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON."""
        fields = json.loads(text)
        source, address = ContextFacts.read(fields.pop("source")), fields.pop("address")
        return cls(source, PeerAddress.model_validate_json(address), **fields)

    def text(self) -> str:
        """As JSON."""
        facts = {"source": self.source.text(), "address": self.address.model_dump_json()}
        return json.dumps({**facts, "requests": self.requests, "control_port": self.control_port})


class GenerationRank:
    """Gives pages as soon as a request is announced."""

    def __init__(self, facts: GenerationFacts, say: Callable[[str], None]) -> None:
        """``say`` is told of events, one line each."""
        source = facts.source
        blocks = source.num_slots
        self._facts = facts
        self._listener = say
        self._soaking = False
        self.signals: dict[str, signal.Signals] = {}
        """What comes with the first chunk of a request, by its id."""
        self.leases_out = 0
        self.wrong_pages = 0
        self._free = [
            list(range(number * blocks, (number + 1) * blocks)) for number in range(facts.requests)
        ]
        self._held: dict[str, list[int]] = {}
        self._over: dict[str, asyncio.Event] = {}
        expected = ArrayMemory(blocks, source.groups)
        fill_tokens(expected, source)
        self._expected = {key: array[source.slots()] for key, array in expected.pools.items()}
        self.memory = ArrayMemory(blocks * facts.requests, source.groups)
        for array in self.memory.pools.values():
            array[:] = FREE
        info = rank_info("generation", groups=source.groups, tokens_per_page=source.tokens_per_page)
        self.agent = TransferAgent(
            rank_info=info,
            instance=(info,),
            views=VIEWS,
            transport=UcxTransport("127.0.0.1"),
            memory=self.memory,
            config=AgentConfig(
                host="127.0.0.1",
                cluster_token=TOKEN,
                control_port=facts.control_port,
                timing=source.timing,
            ),
            deliver=self.handle,
        )

    @property
    def state(self) -> RankState:
        return RankState.of(self.agent, self.leases_out, self.wrong_pages)

    def handle(self, event: AgentEvent) -> None:
        name = event.request_id
        match event:
            case AnnounceReceived():
                self._give_pages(name)
            case ChunkReceived():
                self._say(f"chunk {name} {event.end_block}")
                if name in self.signals:
                    os.kill(os.getpid(), self.signals.pop(name))
            case HandoffReceived():
                assert event.data == HANDOFF
            case SessionEnded():
                if event.outcome is Outcome.SUCCEEDED:
                    self._check(name)
                self._say(f"ended {name} {event.outcome.value} {event.reason}")
                if name not in self._held:
                    self._forget(name)
            case LeaseInDoubt():
                self._say(f"doubt {name}")
            case LeaseEnded():
                self._take_home(name)
            case _:
                pass

    def start(self, request_id: str) -> asyncio.Event:
        """Grant a request; the event is set when nothing is left of it."""
        self._over[request_id] = asyncio.Event()
        self.agent.grant(request_id, (self._facts.address,), 10, DEADLINE_MS)
        return self._over[request_id]

    async def soak(self, first: int, count: int, cancel_every: int) -> float:
        """Requests one after another; seconds."""
        turns = random.Random(first)
        self._soaking = True
        started = time.perf_counter()
        for number in range(first, first + count):
            name = f"soak {number}#{number % self._facts.source.num_slots}"
            over = self.start(name)
            if cancel_every and number % cancel_every == 0:
                for _ in range(turns.randrange(MAX_TURNS)):
                    await asyncio.sleep(0)
                self.agent.cancel(name, "not wanted")
            await over.wait()
        self._soaking = False
        return time.perf_counter() - started

    def _say(self, line: str) -> None:
        if not self._soaking:
            self._listener(line)

    def _give_pages(self, name: str) -> None:
        slots = self._free.pop()
        for array in self.memory.pools.values():
            self.wrong_pages += int((array[slots] != FREE).any(axis=1).sum())
        self._held[name] = slots
        self.leases_out += 1
        self.agent.ready(name, 0, len(slots), lease(0, slots))
        # Behind the agent's own work, which sends it.
        asyncio.get_running_loop().call_soon(self._say, f"ready {name}")

    def _check(self, name: str) -> None:
        slots = self._held[name]
        for key, array in self.memory.pools.items():
            expected = np.roll(self._expected[key], -first_content(name), axis=0)
            self.wrong_pages += int((array[slots] != expected).any(axis=1).sum())

    def _take_home(self, name: str) -> None:
        slots = self._held.pop(name)
        for array in self.memory.pools.values():
            array[slots] = FREE
        self._free.append(slots)
        self.leases_out -= 1
        self._say(f"home {name}")
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._over.pop(name).set()


async def obey(facts: GenerationFacts) -> None:
    """The process's life."""
    rank = GenerationRank(facts, lambda line: print(line, flush=True))
    address = await rank.agent.start()
    print(address.model_dump_json())
    async for line in orders():
        match line.split():
            case ["start", *name]:
                rank.start(" ".join(name))
            case ["cancel", *name]:
                rank.agent.cancel(" ".join(name), "not wanted")
            case ["signal", number, *name]:
                rank.signals[" ".join(name)] = signal.Signals[number]
            case ["soak", first, count, cancel_every]:
                seconds = await rank.soak(int(first), int(count), int(cancel_every))
                print(f"soaked {seconds}")
            case ["state"]:
                print(json.dumps(asdict(rank.state)))
            case _:
                raise ValueError(f"unknown order {line!r}")
    await rank.agent.close()
    print("bye")


def main(facts: str) -> None:
    """``facts`` is :class:`GenerationFacts` as JSON."""
    uvloop.run(obey(GenerationFacts.read(facts)))
