"""Layer specs and sizing demands from JSON, with the path of whatever is wrong.

    {"tokens_per_block": 64,                     required
     "max_sequence_tokens": 32768,               or null: windows are kept as they are
     "quota_bytes": 1073741824,                  optional
     "host_quota_bytes": 4294967296,             optional
     "demand": {...},                            optional: fields of SizingDemand, all numbers, and
                                                 "pool_ratios": [...],
                                                 "typical_step": [[capacity, history], ...],
                                                 "constraints": [[[capacity, history], ...], ...]
     "layers": [{"layer_id": 0, ...} or          fields of KVCacheLayerSpec, enums by their values;
                {"layer_ids": [1, 2], ...}]}     one object may describe several layers

A layer needs owner, dtype, num_kv_heads and head_dim, or owner and state_buffers; extra_buffers and
state_buffers are lists of BufferSpec fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvcache_core.sizing_demand import DEFAULT_DEMAND, BatchStep, SizingDemand
from kvcache_core.spec import (
    BufferRole,
    BufferSpec,
    ElementType,
    IndexKind,
    KVCacheLayerOwner,
    KVCacheLayerSpec,
    PageMapping,
    ReusePolicy,
    recurrent_layer,
)

E = TypeVar("E", bound=Enum)
T = TypeVar("T")


class SpecFileError(ValueError):
    """A document that does not say what is needed; the message begins with the field's path."""


@dataclass(frozen=True, kw_only=True)
class SpecFile:
    """What a file says."""

    specs: tuple[KVCacheLayerSpec, ...]
    tokens_per_block: int
    max_sequence_tokens: int | None
    quota_bytes: int | None
    host_quota_bytes: int
    demand: SizingDemand


class _Fields:
    """The fields of one JSON object; each is taken once, and what is left is unknown."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise SpecFileError(f"{path}: expected an object, got {_shown(value)}")
        self._left: dict[str, object] = dict(value)
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: object = MISSING) -> object:
        if name in self._left:
            return self._left.pop(name)
        if default is MISSING:
            raise SpecFileError(f"{self.path(name)}: missing")
        return default

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.take(name, MISSING if default is None else default)
        return _integer(value, self.path(name))

    def optional_integer(self, name: str) -> int | None:
        value = self.take(name, None)
        return None if value is None else _integer(value, self.path(name))

    def boolean(self, name: str) -> bool:
        """A field that is false unless given."""
        value = self.take(name, default=False)
        if not isinstance(value, bool):
            raise SpecFileError(f"{self.path(name)}: expected true or false, got {_shown(value)}")
        return value

    def choice(self, name: str, kind: type[E], default: E | None = None) -> E:
        value = self.take(name, MISSING if default is None else default.value)
        for member in kind:
            if value == member.value:
                return member
        known = [member.value for member in kind]
        raise SpecFileError(f"{self.path(name)}: expected one of {known}, got {_shown(value)}")

    def items(self, name: str) -> list[tuple[object, str]]:
        """Entries of a list with their paths; a missing list is empty."""
        return _items(self.take(name, []), self.path(name))

    def finish(self, what: str) -> None:
        """Refuse what nobody took: a misspelt field is not silently a default."""
        if self._left:
            raise SpecFileError(f"{self.path(sorted(self._left)[0])}: unknown field of {what}")


def _items(value: object, path: str) -> list[tuple[object, str]]:
    if not isinstance(value, list):
        raise SpecFileError(f"{path}: expected a list, got {_shown(value)}")
    return [(entry, f"{path}[{index}]") for index, entry in enumerate(value)]


def _integer(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecFileError(f"{path}: expected an integer, got {_shown(value)}")
    return value


def _number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecFileError(f"{path}: expected a number, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    return json.dumps(value)


def read_spec_file(path: Path) -> SpecFile:
    """Read a file. Raises SpecFileError, and OSError when it cannot be read."""
    try:
        return parse_spec(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise SpecFileError(f"line {error.lineno} column {error.colno}: {error.msg}") from error


def parse_spec(document: object) -> SpecFile:
    """A parsed JSON document as specs. Raises SpecFileError."""
    top = _Fields(document, "")
    specs: list[KVCacheLayerSpec] = []
    for entry, path in top.items("layers"):
        specs.extend(_layers(entry, path))
    if not specs:
        raise SpecFileError("layers: expected at least one layer")
    result = SpecFile(
        specs=tuple(specs),
        tokens_per_block=top.integer("tokens_per_block"),
        max_sequence_tokens=top.optional_integer("max_sequence_tokens"),
        quota_bytes=top.optional_integer("quota_bytes"),
        host_quota_bytes=top.integer("host_quota_bytes", 0),
        demand=_demand(top.take("demand", {}), "demand"),
    )
    top.finish("the document")
    return result


def _layers(value: object, path: str) -> list[KVCacheLayerSpec]:
    """One entry of ``layers``: a spec for each of its ids."""
    entry = _Fields(value, path)
    if entry.has("layer_ids"):
        ids = [_integer(item, where) for item, where in entry.items("layer_ids")]
    else:
        ids = [entry.integer("layer_id")]
    owner = entry.choice("owner", KVCacheLayerOwner)
    policy = entry.choice("policy", ReusePolicy, ReusePolicy.REQUIRED)
    look_ahead = entry.integer("look_ahead_tokens", 0)
    buffers = [_buffer(item, where) for item, where in entry.items("state_buffers")]
    if buffers:
        entry.finish("a layer with state_buffers")
        made = [_made(path, recurrent_layer, layer, owner, buffers, policy) for layer in ids]
        return [_made(path, replace, spec, look_ahead_tokens=look_ahead) for spec in made]
    common: dict[str, object] = {
        "owner": owner,
        "policy": policy,
        "look_ahead_tokens": look_ahead,
        "needs_hidden_states": entry.boolean("needs_hidden_states"),
        "dtype": entry.choice("dtype", ElementType),
        "num_kv_heads": entry.integer("num_kv_heads"),
        "head_dim": entry.integer("head_dim"),
        "kv_factor": entry.integer("kv_factor", 2),
        "window": entry.optional_integer("window"),
        "sink_tokens": entry.integer("sink_tokens", 0),
        "coalescing_group": entry.integer("coalescing_group", 0),
        "tokens_per_page": entry.optional_integer("tokens_per_page"),
        "scale_block_elements": entry.optional_integer("scale_block_elements"),
        "scale_coalescing_group": entry.integer("scale_coalescing_group", 1),
        "index_kind": entry.choice("index_kind", IndexKind, IndexKind.RAW_SLOT),
        "extra_buffers": tuple(
            _buffer(item, where) for item, where in entry.items("extra_buffers")
        ),
    }
    entry.finish("a layer")
    return [_made(path, KVCacheLayerSpec, layer_id=layer, **common) for layer in ids]


def _buffer(value: object, path: str) -> BufferSpec:
    entry = _Fields(value, path)
    common: dict[str, object] = {
        "role": entry.choice("role", BufferRole),
        "dtype": entry.choice("dtype", ElementType),
        "num_heads": entry.integer("num_heads"),
        "elements_per_head": entry.integer("elements_per_head"),
        "tokens_per_page": entry.optional_integer("tokens_per_page"),
        "coalescing_group": entry.integer("coalescing_group", 0),
        "mapping": entry.choice("mapping", PageMapping, PageMapping.HEAD_MAJOR),
        "sections": tuple(_integer(item, where) for item, where in entry.items("sections")),
    }
    entry.finish("a buffer")
    return _made(path, BufferSpec, **common)


def _demand(value: object, path: str) -> SizingDemand:
    entry = _Fields(value, path)
    common: dict[str, object] = {}
    if entry.has("pool_ratios"):
        common["pool_ratios"] = tuple(
            _number(item, where) for item, where in entry.items("pool_ratios")
        )
    if entry.has("typical_step"):
        common["typical_step"] = _step(entry.take("typical_step"), entry.path("typical_step"))
    common["constraints"] = tuple(_step(item, where) for item, where in entry.items("constraints"))
    for field in fields(SizingDemand):
        if entry.has(field.name):
            common[field.name] = entry.integer(field.name)
    entry.finish("a demand")
    return _made(path, SizingDemand, **common) if common else DEFAULT_DEMAND


def _step(value: object, path: str) -> BatchStep:
    pairs: list[tuple[int, int]] = []
    for item, where in _items(value, path):
        numbers = [_integer(number, place) for number, place in _items(item, where)]
        if len(numbers) != 2:
            raise SpecFileError(f"{where}: expected [capacity, history], got {_shown(item)}")
        pairs.append((numbers[0], numbers[1]))
    return _made(path, BatchStep, tuple(pairs))


def _made(path: str, make: Callable[..., T], *args: object, **kwargs: object) -> T:
    """``make(...)``, its ValueError told with the path."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        raise SpecFileError(f"{path}: {error}") from error
