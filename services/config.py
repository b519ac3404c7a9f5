"""Configuration of ``pageferry serve`` as one frozen value.

Sources, strongest first: flags, one YAML file, the environment (only the cluster token), defaults.
Every key of the file is the flag of the same name with underscores; a key or value that cannot be
used is refused before anything starts.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from router.rules import LoadRule, NewConversationFollow
from services.environment import DEMOTION_VARIABLES, Environment
from services.errors import ConfigError
from services.units import parse_bytes, parse_duration_ms
from worker.config import DpAdmission, ElementType, HooksEntry, KVElementType
from worker.messages import WorkerRole

LogLevel = Literal["debug", "info", "warning", "error"]
Device = Literal["auto", "cpu", "cuda"]


def _auto_as_none(value: Any) -> Any:
    return None if value == "auto" else value


def _bytes_or_auto(value: Any) -> Any:
    return (
        parse_bytes(value) if isinstance(value, str) and value != "auto" else _auto_as_none(value)
    )


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _duration_ms(value: Any) -> Any:
    return parse_duration_ms(value) if isinstance(value, str) else value


SHORT_TYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What element types are called too."""


def _whole_type_name(value: Any) -> Any:
    return SHORT_TYPES.get(value, value) if isinstance(value, str) else value


Bytes = Annotated[int | None, BeforeValidator(_bytes_or_auto)]
HostBytes = Annotated[int, BeforeValidator(_bytes)]
AutoInt = Annotated[int | None, BeforeValidator(_auto_as_none)]
MAX_DURATION_MS: Final = 100 * 365 * 24 * 3_600_000
"""A century. Longer ones are beyond what threads can wait for and messages can say."""
MAX_COUNT: Final = (1 << 31) - 1
DurationMs = Annotated[int, BeforeValidator(_duration_ms), Field(gt=0, le=MAX_DURATION_MS)]


class ServeConfig(BaseModel):
    """What to serve, on how many instances, with which limits. None stands for ``auto``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    """A Hugging Face directory or a GGUF file; None: the default model."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """Name of the model in the API; None: taken from the path."""
    context: int | None = Field(default=None, ge=1)
    """Context instances; None: one, unless ``aggregated`` is set."""
    generation: int | None = Field(default=None, ge=1)
    aggregated: int | None = Field(default=None, ge=1)
    """Instances that do both phases, instead of context and generation ones."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks of an instance: processes on one host that share the model's layers, a GPU each."""
    context_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Of context instances; None: ``tensor_parallel_size``."""
    generation_tensor_parallel_size: int | None = Field(default=None, ge=1)
    attention_dp_size: int = Field(default=1, ge=1)
    """Ranks of an instance that share the model's MLPs alone: each has whole attention and requests
    of its own. Above 1 in place of ``tensor_parallel_size``."""
    context_attention_dp_size: int | None = Field(default=None, ge=1)
    """Of context instances; None: ``attention_dp_size``."""
    generation_attention_dp_size: int | None = Field(default=None, ge=1)
    dp_admission: DpAdmission = "in_order"
    """How such an instance gives requests to its ranks: each at once where most room is, or a
    window of them together, the largest first and only where there is room."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    ray_address: str | None = None
    """Address of a running Ray cluster (``auto`` or ``host:port``); None: a private Ray on this
    machine."""
    cluster_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Scopes the names of the actors in a shared Ray cluster; None: a random name."""
    device: Device = "auto"
    dtype: Annotated[ElementType, BeforeValidator(_whole_type_name)] = "auto"
    kv_cache_dtype: Annotated[KVElementType, BeforeValidator(_whole_type_name)] = "auto"
    """Of keys and values in the cache: the model's own type, or fp8."""
    torch_threads: AutoInt = Field(default=None, ge=1)
    """Threads of each instance; None: the cores divided among the instances of this machine."""
    kv_cache_bytes: Bytes = Field(default=None, gt=0)
    """KV cache of each instance; None: a share of the free memory of its device, which a worker
    measures where it has a GPU for itself."""
    kv_cache_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that is free beside weights, a step and transfers; None: 0.9."""
    host_cache_bytes: HostBytes = Field(default=0, ge=0)
    """Host memory of each instance for KV pages that its cache has no room for; 0: none."""
    tokens_per_block: int = Field(default=64, ge=1)
    max_sequence_tokens: AutoInt = Field(default=None, ge=2)
    """Of a prompt and its output, a token each at least; None: what the model was made for."""
    max_batch_tokens: AutoInt = Field(default=None, ge=1)
    """Tokens of one step; None: 2,048 on a GPU, 512 on a CPU."""
    max_running: AutoInt = Field(default=None, ge=1)
    """Sequences of one step; None: 256 on a GPU, 64 on a CPU."""
    decode_graphs: bool | None = None
    """Decode in CUDA graphs; None: where the device and the model's family have them."""
    steps_under_way: int | None = Field(default=None, ge=1, le=2)
    """2: a step begins before the results of the one before it are seen; None: on a GPU."""
    ctx_demote_uncached_tokens: int | None = Field(default=None, ge=1)
    """Prompts that lack more tokens than this let others go first for a while; None: none does.
    The environment may say both (PAGEFERRY_CTX_DEMOTE_*)."""
    ctx_demote_max_iters: int = Field(default=8, ge=1)
    """Steps for which they do."""
    runtime_hooks: HooksEntry | None = None
    """``module:attribute`` with the model's RuntimeHooks, importable where workers run."""
    require_transport: str | None = None
    load_rule: LoadRule = LoadRule.ESTIMATED
    new_conversation_follow: NewConversationFollow = NewConversationFollow.SPECIFIC
    max_in_flight: int = Field(default=512, ge=1, le=MAX_COUNT)
    """Requests beyond these are refused with 429."""
    request_timeout_ms: DurationMs = 600_000
    """Deadline of a request, queueing included."""
    transfer_timeout_ms: DurationMs = 60_000
    startup_timeout_ms: DurationMs = 600_000
    """An instance that takes longer to start is given up."""
    drain_timeout_ms: DurationMs = 10_000
    """How long requests in flight may go on after the service was asked to stop."""
    cluster_token: SecretStr = Field(default_factory=lambda: SecretStr(secrets.token_urlsafe(32)))
    """Shared secret of all processes of the cluster; None of the flags, as other users see command
    lines."""
    log_level: LogLevel = "info"

    @field_validator("model", "host", "ray_address", "require_transport")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("expected a non-empty text; leave the key out for the default")
        return value

    @field_validator("cluster_token")
    @classmethod
    def _long_enough(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < 8:
            raise ValueError("expected at least 8 characters")
        return value

    @model_validator(mode="after")
    def _one_size(self) -> ServeConfig:
        if self.kv_cache_bytes is not None and self.kv_cache_fraction is not None:
            raise ValueError(
                "kv_cache_bytes excludes kv_cache_fraction: give a size or a share of what is free"
            )
        return self

    @model_validator(mode="after")
    def _one_mode(self) -> ServeConfig:
        if self.aggregated is not None and (
            self.context is not None or self.generation is not None
        ):
            raise ValueError(
                "aggregated excludes context and generation: such an instance does both phases"
            )
        return self

    @property
    def instances(self) -> tuple[tuple[WorkerRole, str], ...]:
        """Role and name of every instance to start."""
        if self.aggregated is not None:
            return _named("aggregated", self.aggregated)
        return _named("context", self.context or 1) + _named("generation", self.generation or 1)

    @model_validator(mode="after")
    def _one_way_to_share(self) -> ServeConfig:
        for role, _ in self.instances:
            dp_size, tp_size = self.dp_size_of(role), self._tp_size_of(role)
            if dp_size > 1 and tp_size not in (1, dp_size):
                raise ValueError(
                    f"attention_dp_size {dp_size} of {role} instances: expected "
                    f"tensor_parallel_size 1 or {dp_size}, got {tp_size}; ranks share attention "
                    "or have it whole, all of them"
                )
        return self

    def ranks_of(self, role: WorkerRole) -> int:
        """Ranks of each instance of this role."""
        return max(self._tp_size_of(role), self.dp_size_of(role))

    def dp_size_of(self, role: WorkerRole) -> int:
        """Ranks of each instance of this role that have requests of their own; 1: none has."""
        own = {
            "context": self.context_attention_dp_size,
            "generation": self.generation_attention_dp_size,
            "aggregated": None,
        }
        return own[role] or self.attention_dp_size

    def _tp_size_of(self, role: WorkerRole) -> int:
        own = {
            "context": self.context_tensor_parallel_size,
            "generation": self.generation_tensor_parallel_size,
            "aggregated": None,
        }
        return own[role] or self.tensor_parallel_size


def _named(role: WorkerRole, count: int) -> tuple[tuple[WorkerRole, str], ...]:
    return tuple((role, f"{role}-{number}") for number in range(count))


def load_config(
    flags: Mapping[str, Any], file: Path | None, environment: Environment
) -> ServeConfig:
    """Merge the sources. ``flags`` holds those given on the command line only. Raises
    ConfigError."""
    values: dict[str, Any] = {}
    if environment.cluster_token is not None:
        values["cluster_token"] = environment.cluster_token
    for name, key in DEMOTION_VARIABLES.items():
        if name in environment.forwarded:
            values[key] = environment.forwarded[name]
    if file is not None:
        values.update(read_config_file(file))
    # A mode chosen by flags replaces the file's mode as a whole.
    if "aggregated" in flags:
        values.pop("context", None)
        values.pop("generation", None)
    elif "context" in flags or "generation" in flags:
        values.pop("aggregated", None)
    values.update(flags)
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, file)) from error


def read_config_file(file: Path) -> dict[str, Any]:
    """Keys and values of a YAML file, its model path resolved against the file's folder. Raises
    ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file}: cannot be read: {error}") from error
    try:
        # A subclass of SafeLoader that refuses repeated keys.
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {file}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"configuration file {file}: expected a mapping of keys to values, "
            f"got a {type(content).__name__}"
        )
    unknown = [str(key) for key in content if key not in ServeConfig.model_fields]
    if unknown:
        raise ConfigError(
            f"configuration file {file}: " + "; ".join(_unknown_key(key) for key in unknown)
        )
    model = content.get("model")
    if isinstance(model, str) and model.strip():
        content["model"] = str(file.parent / Path(model).expanduser())
    return {str(key): value for key, value in content.items()}


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(
        key.replace("-", "_"), ServeConfig.model_fields, n=1, cutoff=0.5
    )
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"known keys: {', '.join(ServeConfig.model_fields)}"
    )
    return f"unknown key {key!r}, {hint}"


def _explain(error: ValidationError, file: Path | None) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in problem["loc"] if isinstance(part, str))
        message = problem["msg"].removeprefix("Value error, ")
        value = problem["input"]
        shown = (
            f", got {value!r}" if key and key != "cluster_token" and "got " not in message else ""
        )
        lines.append(f"{key}: {message}{shown}" if key else message)
    where = f" (flags and {file})" if file is not None else ""
    return f"invalid configuration{where}: " + "; ".join(lines)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error instead of the last one winning."""


def _mapping_without_repeats(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
    if repeated:
        raise yaml.constructor.ConstructorError(
            None, None, f"repeated key {', '.join(repeated)}", node.start_mark
        )
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats
)
