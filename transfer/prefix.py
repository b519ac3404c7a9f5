"""The beginning of a prompt, as one instance asks another for its KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Whole blocks of tokens in a prefix cache scope.

    Tokens and not block keys travel: the tree of the source compares tokens where it has several
    children, and its followers open the same sequence from the operation log.
    """

    scope: bytes
    tokens: npt.NDArray[np.int32]
