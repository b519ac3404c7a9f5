"""A context and a generation instance as processes, and what can be asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.transfer.cases import Case, Model, Shape, streams_apart
from benchmarks.transfer.pages import RankSpec
from benchmarks.transfer.prefill import CALM_S
from benchmarks.transfer.report import Round

START_S: Final = 120.0
ANSWER_S: Final = 180.0
LINE_BYTES: Final = 1 << 20
ROLES: Final = ("context", "generation")


class RankProcess:
    """One rank."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, spec: RankSpec, environment: Mapping[str, str]) -> RankProcess:
        """Start it; :meth:`hear` gives its first word."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.transfer", "--rank", json.dumps(asdict(spec))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=environment,
        )
        return cls(process)

    async def ask(self, verb: str, **told: Any) -> dict[str, Any]:
        """Its answer. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **told}).encode() + b"\n")
        return await self.hear(ANSWER_S)

    async def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises RuntimeError."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process is gone"}
        if "error" in answer:
            raise RuntimeError(f"a rank failed: {answer['error']}")
        return answer

    async def end(self) -> None:
        """Let it close; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), START_S / 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ranks' pools are."""

    device: str
    gpus: int
    pool_blocks: int

    def gpu(self, role: str, rank: int) -> int:
        """Of a rank: context ranks take the first half of the GPUs in turn, generation ranks the
        others, so that no page stays on its GPU; with one GPU every rank is there.
        """
        contexts = self.gpus // 2
        if role == "context":
            return rank % max(contexts, 1)
        return contexts + rank % (self.gpus - contexts)

    def environment(self, role: str, rank: int) -> dict[str, str]:
        """Of the process of a rank: it sees its own GPU only."""
        if self.gpus < 2:
            return dict(os.environ)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(self.gpu(role, rank))}


@dataclass(frozen=True)
class Timed:
    """Clocks of the ranks around one transfer."""

    start: float
    end: float
    staged_bytes: int = 0
    last_done: float = 0.0
    """Clock when the last chunk was computed."""

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last rank's end."""
        return self.end - self.start


class Instances:
    """All ranks of both sides."""

    def __init__(
        self, model: Model, pool_blocks: int, contexts: list[RankProcess], gens: list[RankProcess]
    ) -> None:
        self._model = model
        self._pool_blocks = pool_blocks
        self._contexts = contexts
        self._generations = gens
        self._requests = 0
        self.lanes: tuple[str, ...] = ()
        """Main lane of every connection between the sides."""

    def size_bytes(self, case: Case) -> int:
        """Of all streams."""
        return case.streams * self._model.blocks(case.tokens) * self._model.block_bytes

    def apart(self, case: Case) -> int:
        """Streams with slots of their own."""
        return streams_apart(self._pool_blocks, self._model.blocks(case.tokens), case.streams)

    async def connect(self, sources: list[Any]) -> None:
        """Dial every generation rank with every context rank."""
        offers = await self._of(self._contexts, "listen", receivers=len(self._generations))
        dialled = await asyncio.gather(
            *(
                rank.ask(
                    "dial", sources=sources, raw=[offer["addresses"][number] for offer in offers]
                )
                for number, rank in enumerate(self._generations)
            )
        )
        self.lanes = tuple(sorted({lane for answer in dialled for lane in answer["lanes"]}))

    async def round(self, case: Case, *, raw_first: bool) -> Round:
        """One round of a case."""
        copy = await self._generations[0].ask("copy")
        if raw_first:
            raw = await self._timed(self.raw(case))
            pages = await self._timed(self.whole(case))
        else:
            pages = await self._timed(self.whole(case))
            raw = await self._timed(self.raw(case))
        return Round(
            copy_gb_s=copy["gb_s"],
            raw_s=raw[0].seconds,
            pages_s=pages[0].seconds,
            passes=pages[0].staged_bytes / self.size_bytes(case),
            raw_cpu_s=raw[1],
            pages_cpu_s=pages[1],
        )

    async def raw(self, case: Case) -> Timed:
        """The raw messages."""
        blocks = self._model.blocks(case.tokens)
        answers = await self._of(self._generations, "raw", blocks=blocks, streams=case.streams)
        return Timed(_start(answers), _end(answers))

    async def whole(self, case: Case) -> Timed:
        """Pages of prompts that are computed already."""
        return await self.pages(case, [(self._model.blocks(case.tokens), 0.0)])

    async def pages(self, case: Case, chunks: Iterable[tuple[int, float]]) -> Timed:
        """One request a stream, in chunks given by end block and seconds of computing."""
        told = self._told(case)
        offered = await self._of(self._contexts, "offer", **told, chunks=list(chunks))
        await self._of(self._generations, "grant", **told)
        fetched = await self._of(self._generations, "fetch", way=case.way)
        settled = await self._of(self._contexts, "settle")
        moved = sum(answer["bytes"] for answer in fetched)
        if moved != self.size_bytes(case):
            raise RuntimeError(f"{case}: expected {self.size_bytes(case)} bytes, moved {moved}")
        gathered = sum(answer["staged_bytes"] for answer in settled) - sum(
            answer["staged_bytes"] for answer in offered
        )
        return Timed(
            _start(fetched),
            _end(fetched),
            gathered + sum(answer["staged_bytes"] for answer in fetched),
            max(answer["last_done"] for answer in settled),
        )

    async def verify(self, case: Case) -> None:
        """One round whose every byte is compared. Raises RuntimeError."""
        told = self._told(case)
        await self._of(self._generations, "erase", **told)
        await self.whole(case)
        await self._of(self._generations, "check", **told)

    async def load(self) -> float:
        """Start a prefill in every context rank; steps a second of all of them alone."""
        answers = await self._of(self._contexts, "load", calm_s=CALM_S)
        return float(sum(answer["speed"] for answer in answers))

    async def speed(self) -> float:
        """Steps a second of the prefills since they were last asked."""
        return float(sum(answer["speed"] for answer in await self._of(self._contexts, "speed")))

    async def calm(self) -> None:
        """Stop the prefills."""
        await self._of(self._contexts, "calm")

    def _told(self, case: Case) -> dict[str, Any]:
        names = [f"r{self._requests + stream}" for stream in range(case.streams)]
        self._requests += case.streams
        return {"names": names, "blocks": self._model.blocks(case.tokens), "way": case.way}

    async def _timed(self, transfer: Awaitable[Timed]) -> tuple[Timed, float]:
        """A transfer and the processor time of all ranks meanwhile."""
        before = await self._cpu_s()
        timed = await transfer
        return timed, await self._cpu_s() - before

    async def _cpu_s(self) -> float:
        answers = await self._of([*self._contexts, *self._generations], "cpu")
        return float(sum(answer["cpu_s"] for answer in answers))

    async def _of(self, ranks: list[RankProcess], verb: str, **told: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(rank.ask(verb, **told) for rank in ranks))


@contextlib.asynccontextmanager
async def instances(shape: Shape, model: Model, places: Places) -> AsyncIterator[Instances]:
    """Both instances, connected; ended at the end."""
    token, nonces = secrets.token_hex(16), {role: secrets.token_hex(8) for role in ROLES}
    ranks: dict[str, list[RankProcess]] = {role: [] for role in ROLES}
    try:
        for role, size in zip(ROLES, (shape.context, shape.generation), strict=True):
            for rank in range(size):
                spec = RankSpec(
                    role=role,
                    rank=rank,
                    shape=str(shape),
                    **asdict(model),
                    device=places.device,
                    pool_blocks=places.pool_blocks,
                    token=token,
                    nonce=nonces[role],
                )
                process = await RankProcess.spawn(spec, places.environment(role, rank))
                ranks[role].append(process)
        words = [await process.hear(START_S) for role in ROLES for process in ranks[role]]
        sides = Instances(model, places.pool_blocks, ranks["context"], ranks["generation"])
        await sides.connect([word["source"] for word in words[: shape.context]])
        yield sides
    finally:
        # Generation ranks close the raw connections.
        for role in reversed(ROLES):
            await asyncio.gather(*(process.end() for process in ranks[role]))


def _start(answers: Iterable[Mapping[str, float]]) -> float:
    return min(answer["start"] for answer in answers)


def _end(answers: Iterable[Mapping[str, float]]) -> float:
    return max(answer["end"] for answer in answers)
