"""The deterministic token function that fakes and simulations share: the oracle of every expected
output.

A token depends on prompt, seed, choice and output index only, so any worker that continues a
request from any point gives the same tokens, as a real one must.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FAKE_VOCAB_SIZE = 1000
FAKE_STOP_TOKEN = 999
"""Never produced by :func:`fake_token`; scripts use it to end a choice early."""


def fake_token(
    prompt: Sequence[int] | npt.NDArray[np.int32], seed: int, choice: int, index: int
) -> int:
    """Token at output index ``index`` of ``choice``, in ``[0, FAKE_STOP_TOKEN)``."""
    digest = zlib.crc32(np.asarray(prompt, dtype="<i4").tobytes())
    return zlib.crc32(f"{digest}/{seed}/{choice}/{index}".encode()) % FAKE_STOP_TOKEN


def fake_output(
    prompt: Sequence[int] | npt.NDArray[np.int32], seed: int, choice: int, length: int
) -> tuple[int, ...]:
    """The first ``length`` output tokens of ``choice``."""
    return tuple(fake_token(prompt, seed, choice, index) for index in range(length))
