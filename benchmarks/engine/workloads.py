"""What is asked of every side alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KEYS: Final = (
    "start_s",
    "decode_b1_tok_s",
    "decode_b1_compiled_tok_s",
    "prefill_8k_ms",
    "b64_4k_step_ms",
    "cb_64_tok_s",
    "cb_256_tok_s",
)
"""Every figure that some side has."""


@dataclass(frozen=True)
class Load:
    """``requests`` at once, each of ``prompt`` random tokens, for ``output`` greedy ones."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Workloads:
    """``decode``: one sequence. ``prefill_tokens``: one prompt for one token. ``wide``: sequences
    that decode together, ``prompt`` tokens of context each.
    """

    decode: Load
    prefill_tokens: int
    wide: Load
    loads: dict[str, Load]
    """Everything at once, by key."""

    @property
    def prefill(self) -> Load:
        """The prompt of ``prefill_tokens``."""
        return Load(1, self.prefill_tokens, 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all."""
        loads = (self.decode, self.wide, *self.loads.values())
        return max(self.prefill_tokens + 1, *(load.prompt + load.output for load in loads))


def workloads(scale: int) -> Workloads:
    """Every length and count divided by ``scale``, for tiny models."""

    def scaled(requests: int, prompt: int, output: int) -> Load:
        return Load(*(max(1, number // scale) for number in (requests, prompt, output)))

    one, wide = scaled(1, 1024, 128), scaled(64, 4096, 128)
    return Workloads(
        decode=Load(1, one.prompt, one.output + 1),
        prefill_tokens=max(1, 8192 // scale),
        wide=Load(wide.requests, wide.prompt, wide.output + 1),
        loads={"cb_64_tok_s": scaled(64, 1024, 128), "cb_256_tok_s": scaled(256, 256, 256)},
    )
