"""``python -m benchmarks.serve``: disaggregated against aggregated serving and transformers' own
``generate``, and against any OpenAI-style service that ``--peer-url NAME=URL`` names.

All run at once and take turns (idle ones use no processor time): a round measures every side
at every concurrency, so that a slow minute of the machine hits each of them; figures are medians
over rounds. Every side gets the same real prompts as chats, answers greedily and with exactly
``--output-tokens`` tokens a request. Ours and transformers compute in ``--dtype`` with the same
number of torch threads; how a peer computes is up to who started it. A peer that counts other
prompts than we do is named under ``unequal_prompts``. Times between tokens are those between a
stream's events.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from benchmarks import closed_loop, interpreter_waits, options, prompts, report
from benchmarks.endpoint import Endpoint, discover, named_url
from benchmarks.serve_figures import (
    OURS,
    TRANSFORMERS,
    Modes,
    beside,
    modes_of,
    ratios,
    table,
    unequal_prompts,
)
from benchmarks.service_process import Service, free_port
from benchmarks.transformers_process import TransformersProcess
from services.default_model import resolve

WARM_UP_TOKENS: Final = 8
CACHE: Final = Path.home() / ".cache" / "pageferry" / "benchmarks"
MODES: Final = {
    "disaggregated": ("--context", "1", "--generation", "1"),
    "aggregated": ("--aggregated",),
}


class Side(Protocol):
    """What is measured."""

    def takes(self, concurrency: int) -> bool:
        """Whether as many clients may send at once."""
        ...

    def load(
        self, texts: Sequence[str], concurrency: int, output_tokens: int
    ) -> closed_loop.LoadResult:
        """Send every prompt once, ``concurrency`` at a time."""
        ...


def slices(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Endless slices of ``texts``: every side gets the same prompts in a round, no round repeats
    the last one's.
    """
    endless = itertools.cycle(texts)
    while True:
        yield list(itertools.islice(endless, size))


def measure(given: argparse.Namespace, sides: Mapping[str, Side], texts: Sequence[str]) -> Modes:
    """Summaries by side and concurrency."""
    # One unmeasured load each: caches, lazily bound libraries and first connections.
    for side in sides.values():
        most = max((n for n in given.concurrency if side.takes(n)), default=1)
        side.load(texts[:most], most, WARM_UP_TOKENS)
    sources = {number: slices(texts, given.requests * number) for number in given.concurrency}
    runs: dict[tuple[str, int], list[closed_loop.LoadResult]] = {}
    for number in range(given.rounds):
        for concurrency, source in sources.items():
            batch = next(source)
            for name, side in sides.items():
                if side.takes(concurrency):
                    result = side.load(batch, concurrency, given.output_tokens)
                    runs.setdefault((name, concurrency), []).append(result)
        print(f"round {number + 1} of {given.rounds} done", flush=True)
    return modes_of(runs)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``peer_url`` is a list of names and addresses."""
    parser = options.parser("serve", __doc__)
    parser.add_argument(
        "--model", help="Hugging Face directory or GGUF file; the default model when left out"
    )
    sides = [*OURS, TRANSFORMERS]
    parser.add_argument("--modes", nargs="*", choices=sides, default=sides)
    parser.add_argument(
        "--peer-url",
        type=named_url,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a running service to measure beside ours, with the same model; may be repeated",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--requests", type=int, default=4, help="requests a client sends in each round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="as pageferry serve takes it")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of every process that computes"
    )
    given = parser.parse_args(arguments)
    names = [*sides, *(name for name, _ in given.peer_url)]
    if len(set(names)) < len(names):
        parser.error(f"--peer-url: expected names of their own, got {names[len(sides) :]}")
    return given


def started(given: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Side]:
    """Our sides and transformers, up until ``stack`` ends."""
    if not given.modes:
        return {}
    print(f"starting {', '.join(given.modes)}", flush=True)
    model = Path(given.model) if given.model else resolve()
    common = ["--torch-threads", str(given.threads), "--dtype", given.dtype]
    sides: dict[str, Side] = {}
    for name in given.modes:
        if name == TRANSFORMERS:
            process = TransformersProcess(model, given.threads, given.dtype)
            stack.callback(process.close)
            sides[name] = process
        else:
            service = Service(model, free_port(), [*MODES[name], *common])
            stack.enter_context(service)
            sides[name] = Endpoint(service.url, service.model)
    return sides


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the peers, start our sides, measure and print."""
    given = parse(arguments)
    peers = {name: discover(name, url) for name, url in given.peer_url}
    with contextlib.ExitStack() as stack:
        ours = started(given, stack)
        modes = measure(given, ours | peers, [turns[0] for turns in prompts.mt_bench(CACHE)])
        waits = {
            name: interpreter_waits.read(side.url)
            for name, side in ours.items()
            if isinstance(side, Endpoint)
        }
    print(table(modes))
    result = {
        "modes": modes,
        "ratios": ratios(modes),
        "peers": beside(modes, list(peers)),
        "interpreter_waits": waits,
        "unequal_prompts": unequal_prompts(modes),
        "threads": given.threads,
    }
    for text in result["unequal_prompts"]:
        print(f"not the same prompts: {text}")
    report.finish(result, given.out)


if __name__ == "__main__":
    main()
