"""The interpreter with the second look at the language left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.triton_interpreter import PatchOnce

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(
    not isinstance(interpreter._patch_lang, PatchOnce), reason="kernels are compiled here"
)


@triton.jit  # type: ignore[untyped-decorator]
def _doubled(row: Any) -> Any:
    return row + tl.where(row > 0, row, row)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(rows: Any, sums: Any, WIDTH: tl.constexpr) -> None:
    row = tl.load(rows + WIDTH * tl.program_id(0) + tl.arange(0, WIDTH))
    # Functions here, and of Triton's own, whose module names the language otherwise.
    tl.store(sums + tl.program_id(0), tl.sum(_doubled(_doubled(row)), 0))


def test_the_language_is_patched_for_each_launch_and_put_back() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    for _ in range(2):
        sums = torch.zeros(3)
        _sums[(3,)](rows, sums, WIDTH=4)
        assert sums.tolist() == (4 * rows.sum(1)).tolist()
        assert tl.core.is_builtin(tl.load)
        assert interpreter._patch_lang._patched == set()


def test_a_launch_that_fails_puts_it_back() -> None:
    with pytest.raises(interpreter.InterpreterError):
        _sums[(1,)](torch.zeros(3), torch.zeros(1), WIDTH=3)  # no power of two
    assert tl.core.is_builtin(tl.load)
    assert interpreter._patch_lang._patched == set()
