"""Where a model's runtime hooks come from: ``module:attribute``, imported once by every rank.

The attribute is a :class:`RuntimeHooks` for whatever model is served, or a mapping from model
family to one; a family that it leaves out has all hooks off.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from worker.runtime_hooks import ALL_OFF, RuntimeHooks


@dataclass(frozen=True, slots=True)
class HookDeclarations:
    """Hooks of ``families``, and of ``others``."""

    families: Mapping[str, RuntimeHooks] = field(default_factory=dict)
    others: RuntimeHooks = ALL_OFF

    def of(self, family: str) -> RuntimeHooks:
        """What the models of one family declare."""
        return self.families.get(family, self.others)


def declared_hooks(entry: str | None) -> HookDeclarations:
    """What ``module:attribute`` declares; None declares nothing.

    Raises:
        ValueError: the module cannot be imported, has no such attribute, or it is something else.
            What the module itself raises is passed on, HookError of a class in it among others.
    """
    if entry is None:
        return HookDeclarations()
    module_name, _, attribute = entry.partition(":")
    where = f"runtime_hooks {entry}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: expected a module that every worker can import, got: {error}; install it "
            "where workers run"
        ) from error
    names = vars(module)
    if attribute not in names:
        known = sorted(name for name, value in names.items() if isinstance(value, RuntimeHooks))
        raise ValueError(f"{where}: {module_name} has no {attribute!r}; it has the hooks {known}")
    value = names[attribute]
    if isinstance(value, RuntimeHooks):
        return HookDeclarations(others=value)
    if isinstance(value, Mapping) and all(
        isinstance(family, str) and isinstance(hooks, RuntimeHooks)
        for family, hooks in value.items()
    ):
        return HookDeclarations(families=dict(value))
    raise ValueError(
        f"{where}: expected a RuntimeHooks or a mapping from model family to RuntimeHooks, got "
        f"{value!r}"
    )
