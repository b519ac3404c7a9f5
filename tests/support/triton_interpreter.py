"""Triton's interpreter in less time.

While a kernel runs, the interpreter has its own functions in the place of the language's. It puts
them there when the kernel is launched, and looks through the whole language again whenever the
kernel calls a function, which finds nothing to do and takes a third of the time. Here the second
look is left out wherever the same modules were patched in the same launch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


class _Nothing:
    """A scope in which nothing was patched."""

    def restore(self) -> None:
        pass


class _Launch:
    """The scope of a kernel's launch, which has put everything back when it ends."""

    def __init__(self, scope: Any, patched: set[ModuleType]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


class PatchOnce:
    """In place of the interpreter's ``_patch_lang``, which is ``patch``."""

    def __init__(self, patch: Callable[[FunctionType], Any], languages: list[ModuleType]) -> None:
        self._patch = patch
        self._languages = languages
        self._patched: set[ModuleType] = set()
        """By the launch that is under way."""

    def __call__(self, function: FunctionType) -> Any:
        seen = {
            value
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in self._languages
        }
        if seen and seen <= self._patched:
            return _Nothing()
        is_launch = not self._patched
        scope = self._patch(function)
        self._patched |= seen
        return _Launch(scope, self._patched) if is_launch else scope


def speed_up() -> None:
    """If this process interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return
    if not isinstance(interpreter._patch_lang, PatchOnce):
        interpreter._patch_lang = PatchOnce(interpreter._patch_lang, [tl, tl.core])
