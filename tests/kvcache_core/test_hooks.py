"""K36, B48-B50: an override that would never be called fails when its class is created."""

from __future__ import annotations

from typing import Any, final

import pytest
from typing_extensions import override

from kvcache_core.hooks import HookBase, HookError, hook, overrides_hook


class Cache(HookBase):
    """A base with hooks, and a method that composes two of them."""

    @hook
    def batch_indices(self, ids: list[int], num_blocks_per_seq: list[int] | None = None) -> str:
        return f"base {ids} {num_blocks_per_seq}"

    @hook
    def prepare_scratch(self) -> str:
        return "base scratch"

    @hook
    def options(self, name: str, *values: int, strict: bool = False, **more: int) -> str:
        return f"base {name} {values} {strict} {more}"

    @hook
    async def wait(self, deadline_ms: int) -> None:
        return None

    @final
    def prepare(self) -> list[str]:
        return [self.prepare_scratch(), self.batch_indices([1])]

    def plain(self) -> str:
        return "plain"


def derived(name: str, method: Any, *, bases: tuple[type, ...] = (Cache,)) -> type:
    """A class made like ``class Sub(*bases)`` with one member."""
    return type("Sub", bases, {name: method, "__module__": "model"})


def test_k36_an_override_that_binds_is_called() -> None:
    class Sub(Cache):
        @override
        @overrides_hook
        def prepare_scratch(self) -> str:
            return "sub scratch"

        @override
        @overrides_hook
        def batch_indices(self, ids: list[int], num_blocks_per_seq: list[int] | None = None) -> str:
            return "sub " + super().batch_indices(ids, num_blocks_per_seq)

        def own(self) -> int:
            return 1

    class SubSub(Sub):
        @override
        @overrides_hook
        def prepare_scratch(self) -> str:
            return "sub sub scratch"

    assert Sub().prepare() == ["sub scratch", "sub base [1] None"]
    assert SubSub().prepare() == ["sub sub scratch", "sub base [1] None"]
    assert Cache().prepare() == ["base scratch", "base [1] None"]


def test_b48_a_renamed_hook_leaves_no_dead_override() -> None:
    """The base renamed _build to _prepare; the override of the old name was never called again."""

    def build_scratch(self: Cache) -> str:
        return "dead"

    with pytest.raises(HookError, match=r"model\.Sub|build_scratch") as failure:
        derived("build_scratch", overrides_hook(build_scratch))
    assert "prepare_scratch" in str(failure.value), "the hooks there are must be named"
    with pytest.raises(HookError, match="plain is marked overrides_hook, but no base"):

        class Sub(Cache):
            @override
            @overrides_hook
            def plain(self) -> str:
                return "not a hook"


def test_k36_an_unmarked_method_may_not_shadow_a_hook() -> None:
    with pytest.raises(HookError, match=r"shadows the hook Cache\.prepare_scratch\(self\)"):

        class Sub(Cache):
            @override
            def prepare_scratch(self) -> str:
                return "by accident"

    with pytest.raises(HookError, match="without overrides_hook"):
        derived("prepare_scratch", None)
    with pytest.raises(HookError, match="declares a hook that Cache has"):
        derived("prepare_scratch", hook(lambda self: "x"))


def test_k36_a_mixin_may_not_shadow_a_hook() -> None:
    """A mixin is no HookBase: only the class that puts it before the base can see the clash."""

    class Mixin:
        def prepare_scratch(self) -> str:
            return "mixin"

    with pytest.raises(HookError, match=r"Mixin\.prepare_scratch shadows the hook"):
        type("Both", (Mixin, Cache), {})
    type("BaseFirst", (Cache, Mixin), {})

    class Marked:
        @overrides_hook
        def prepare_scratch(self) -> str:
            return "mixin"

    both = type("Both", (Marked, Cache), {})
    assert both().prepare()[0] == "mixin"


def test_b49_what_composes_hooks_cannot_be_bypassed() -> None:
    """An override of the composing method left the base's scratch tensors unprepared."""
    with pytest.raises(HookError, match="composes hooks and is final"):

        class Sub(Cache):
            @override  # type: ignore[misc]
            def prepare(self) -> list[str]:
                return ["nothing prepared"]

    with pytest.raises(HookError, match="composes hooks and is final"):
        derived("prepare", overrides_hook(lambda self: []))


def test_b50_the_keyword_that_the_base_passes_must_be_taken() -> None:
    with pytest.raises(HookError, match="'num_blocks_per_seq' is missing") as failure:

        class Sub(Cache):
            @override
            @overrides_hook
            def batch_indices(self, ids: list[int]) -> str:  # type: ignore[override]
                return ""

    message = str(failure.value)
    assert "Sub.batch_indices(self, ids: " in message
    assert "Cache.batch_indices(self, ids: " in message
    assert message.count("num_blocks_per_seq") >= 2, "both signatures belong into the message"


def fits(signature: str, name: str) -> bool:
    """Whether a method with this signature may override the hook ``name``."""
    space: dict[str, Any] = {}
    exec(f"def method({signature}): return None", space)
    try:
        derived(name, overrides_hook(space["method"]))
    except HookError as error:
        return signature not in str(error)
    return True


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("self, ids, num_blocks_per_seq=None", True),
        ("self, ids, num_blocks_per_seq=None, extra=0", True),
        ("self, ids, num_blocks_per_seq=None, *, extra=0", True),
        ("self, ids=(), num_blocks_per_seq=()", True),
        ("self, *args, **kwargs", True),
        ("self, ids, *args, **kwargs", True),
        ("self, ids, num_blocks_per_seq", False),
        ("self, ids, blocks=None", False),
        ("self, rows, num_blocks_per_seq=None", False),
        ("self, num_blocks_per_seq=None, ids=None", False),
        ("self, ids, *, num_blocks_per_seq=None", False),
        ("self, ids, /, num_blocks_per_seq=None", False),
        ("self, ids, num_blocks_per_seq=None, *, extra", False),
        ("self, ids, *args", False),
        ("self, **kwargs", False),
        ("self, extra=1, *args, **kwargs", False),
        ("self, ids, extra=1, *args, **kwargs", False),
    ],
)
def test_k36_the_signature_of_the_hook_must_be_accepted(signature: str, *, expected: bool) -> None:
    """``self, extra=1, *args, **kwargs`` takes every call, but binds ids to something else."""
    assert fits(signature, "batch_indices") is expected


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("self, name, *values, strict=False, **more", True),
        ("self, name, *values, **more", True),
        ("self, name, *values, strict=False", False),
        ("self, name, strict=False, **more", False),
        ("self, name, *values, strict, **more", False),
        ("self, name, *values, lenient, **more", False),
    ],
)
def test_k36_variadic_and_keyword_parameters_must_be_accepted(
    signature: str, *, expected: bool
) -> None:
    assert fits(signature, "options") is expected


def test_k36_a_coroutine_hook_stays_one() -> None:
    with pytest.raises(HookError, match="only the hook is a coroutine function"):

        class Sub(Cache):
            @override
            @overrides_hook
            def wait(self, deadline_ms: int) -> None:  # type: ignore[override]
                return None


def test_k36_a_class_method_may_be_a_hook_and_stays_one() -> None:
    class Sized(HookBase):
        @classmethod
        @hook
        def slots(cls, quota_bytes: int) -> str:
            return f"base of {cls.__name__}: {quota_bytes}"

    class Larger(Sized):
        @classmethod
        @override
        @overrides_hook
        def slots(cls, quota_bytes: int) -> str:
            return "larger " + super().slots(quota_bytes)

    assert Larger.slots(3) == "larger base of Larger: 3"
    with pytest.raises(HookError, match="'quota_bytes' is missing"):
        derived("slots", classmethod(overrides_hook(lambda cls: "")), bases=(Sized,))
    with pytest.raises(HookError, match="only the hook is a class method"):
        derived("slots", overrides_hook(lambda self, quota_bytes: ""), bases=(Sized,))
    with pytest.raises(HookError, match="only the override is a class method"):
        derived("prepare_scratch", classmethod(overrides_hook(lambda cls: "")))
    with pytest.raises(HookError, match="no base of Sub has a hook of that name"):
        derived("slot", classmethod(overrides_hook(lambda cls: "")), bases=(Sized,))


def test_k36_only_methods_of_objects_and_classes_are_hooks() -> None:
    with pytest.raises(HookError, match="expected a plain method"):
        overrides_hook(property(lambda self: 1))  # type: ignore[type-var]

    with pytest.raises(HookError, match="expected a plain method"):

        class Sub(Cache):
            @staticmethod
            @hook
            def made() -> int:
                return 1
