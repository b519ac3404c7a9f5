"""Hooks that cannot come loose: an override that binds to nothing fails when its class is created.

A base derives from :class:`HookBase` and marks what may be overridden with :func:`hook`. A subclass
marks what it overrides with :func:`overrides_hook`. Creating a class raises HookError when such a
method names no hook of a base, cannot be called the way the base's callers call the hook, or is not
marked although a base has a hook of that name. Hooks are plain methods and class methods, marked
innermost. Methods that compose hooks are marked with ``typing.final``: no subclass can bypass the
hooks that they call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TypeVar

from typing_extensions import override

from kvcache_core.signatures import mismatches

HOOK = "__hook__"
OVERRIDES_HOOK = "__overrides_hook__"
FINAL = "__final__"
"""Set by ``typing.final``."""

Method = TypeVar("Method", bound=Callable[..., object])


class HookError(TypeError):
    """A class overrides a hook wrongly. Raised when the class is created."""


def hook(method: Method) -> Method:
    """Mark a method of a HookBase as one that subclasses may override."""
    _function(method).__dict__[HOOK] = True
    return method


def overrides_hook(method: Method) -> Method:
    """Mark a method as the override of a hook of a base."""
    _function(method).__dict__[OVERRIDES_HOOK] = True
    return method


def _function(method: object) -> FunctionType:
    if not isinstance(method, FunctionType):
        raise HookError(
            f"expected a plain method or a class method as a hook, got {method!r}; mark it "
            "innermost"
        )
    return method


def _called(member: object) -> FunctionType:
    """The function behind a member of a class that may be a hook."""
    return _function(member.__func__ if isinstance(member, classmethod) else member)


class HookBase:
    """Base of classes with hooks. Checks every class derived from it, mixins included."""

    @override
    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for owner, name, member in _members(cls):
            _check_member(cls, owner, name, member)


def _members(cls: type) -> Iterator[tuple[type, str, object]]:
    """All that the class and its bases define: a mixin may shadow a hook in this class alone."""
    for owner in cls.__mro__:
        if owner is not object and owner is not HookBase:
            for name, member in vars(owner).items():
                yield owner, name, member


def _check_member(cls: type, owner: type, name: str, member: object) -> None:
    if _is_marked(member, HOOK) or _is_marked(member, OVERRIDES_HOOK):
        _called(member)
    later = cls.__mro__[cls.__mro__.index(owner) + 1 :]
    bases = [base for base in later if name in vars(base)]
    who = f"{owner.__module__}.{owner.__qualname__}.{name}"
    for base in bases:
        if _is_marked(vars(base)[name], FINAL):
            raise HookError(
                f"{who} overrides {base.__qualname__}.{name}, which composes hooks and is final; "
                "override the hooks that it calls"
            )
    declared = [base for base in bases if _is_marked(vars(base)[name], HOOK)]
    if not declared:
        if _is_marked(member, OVERRIDES_HOOK):
            raise HookError(_unknown(cls, who, later))
        return
    base = declared[0]
    theirs = vars(base)[name]
    if _is_marked(member, HOOK):
        raise HookError(
            f"{who} declares a hook that {base.__qualname__} has; mark it overrides_hook"
        )
    if not _is_marked(member, OVERRIDES_HOOK):
        raise HookError(
            f"{who} shadows the hook {_described(base, name, theirs)} without overrides_hook; "
            "mark it, or rename it"
        )
    reasons = _reasons(_called(theirs), _called(member))
    if isinstance(theirs, classmethod) != isinstance(member, classmethod):
        reasons.append(
            f"only the {'override' if isinstance(member, classmethod) else 'hook'} is a "
            "class method"
        )
    if reasons:
        raise HookError(
            f"{_described(owner, name, member)} cannot stand for {_described(base, name, theirs)}: "
            + "; ".join(reasons)
        )


def _unknown(cls: type, who: str, bases: tuple[type, ...]) -> str:
    hooks = sorted(
        {name for base in bases for name, known in vars(base).items() if _is_marked(known, HOOK)}
    )
    return (
        f"{who} is marked overrides_hook, but no base of {cls.__qualname__} has a hook of that "
        f"name; their hooks are {hooks}"
    )


def _reasons(base: FunctionType, override: FunctionType) -> list[str]:
    reasons = mismatches(inspect.signature(base), inspect.signature(override))
    kinds: list[tuple[Callable[[object], bool], str]] = [
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ]
    for is_kind, kind in kinds:
        if is_kind(base) != is_kind(override):
            reasons.append(f"only the {'hook' if is_kind(base) else 'override'} is {kind}")
    return reasons


def _described(owner: type, name: str, member: object) -> str:
    if isinstance(member, classmethod):
        member = member.__func__
    signature = inspect.signature(member) if isinstance(member, FunctionType) else ""
    return f"{owner.__qualname__}.{name}{signature}"


def _is_marked(member: object, mark: str) -> bool:
    """Whether a function carries a mark; what wraps a function carries its marks too."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return isinstance(member, FunctionType) and mark in vars(member)
