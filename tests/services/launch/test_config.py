"""Sources of the configuration: precedence, refusals, units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.config import ServeConfig, load_config
from services.environment import Environment, read_environment
from services.errors import EXIT_USAGE, ConfigError
from services.units import format_bytes, parse_bytes, parse_duration_ms


def environment(**variables: str) -> Environment:
    return read_environment({"HOME": "/home/somebody", **variables})


def write(folder: Path, text: str) -> Path:
    file = folder / "pageferry.yaml"
    file.write_text(text)
    return file


def load(
    flags: dict[str, Any] | None = None, file: Path | None = None, **variables: str
) -> ServeConfig:
    return load_config(flags or {}, file, environment(**variables))


def test_defaults_are_one_context_and_one_generation_instance() -> None:
    config = load()
    assert config.instances == (("context", "context-0"), ("generation", "generation-0"))
    assert config.tokens_per_block == 64
    assert config.kv_cache_bytes is None


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 9000\nmax_running: 8\nkv_cache_bytes: 512MiB\n")
    config = load({"port": 9100}, file)
    assert (config.port, config.max_running, config.kv_cache_bytes) == (9100, 8, 512 << 20)


def test_a_mode_given_by_flags_replaces_the_mode_of_the_file(tmp_path: Path) -> None:
    disaggregated = write(tmp_path, "context: 2\ngeneration: 3\n")
    assert load({"aggregated": 1}, disaggregated).instances == (("aggregated", "aggregated-0"),)
    assert len(load({"context": 1}, disaggregated).instances) == 4
    aggregated = write(tmp_path, "aggregated: 2\n")
    assert [role for role, _ in load({"generation": 1}, aggregated).instances] == [
        "context",
        "generation",
    ]


def test_both_modes_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="aggregated excludes context"):
        load({"aggregated": 1, "context": 1})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("contexts", "context"),
        ("kv-cache-bytes", "kv_cache_bytes"),
        ("max_batch", "max_batch_tokens"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, key: str, nearest: str
) -> None:
    file = write(tmp_path, f"{key}: 1\n")
    with pytest.raises(ConfigError, match=f"unknown key '{key}', did you mean '{nearest}'") as info:
        load(file=file)
    assert info.value.exit_code == EXIT_USAGE


def test_an_unknown_key_like_no_other_lists_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known keys: model, "):
        load(file=write(tmp_path, "zzzzzz: 1\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 70000\n", "port: .*65535.*got 70000"),
        ("context: 0\n", "context: .*greater than or equal to 1"),
        ("kv_cache_bytes: lots\n", "kv_cache_bytes: expected a size such as 512MiB"),
        ("kv_cache_bytes: 512M\n", "'M' is none of"),
        ("device: tpu\n", "device: "),
        ("load_rule: fastest\n", "load_rule: .*'round_robin', 'least_backlog' or 'estimated'"),
        ("model: ''\n", "model: expected a non-empty text"),
        ("host: ''\n", "host: expected a non-empty text"),
        ("max_sequence_tokens: 1\n", "max_sequence_tokens: .*greater than or equal to 2, got 1"),
        ("port: 1\nport: 2\n", "repeated key port"),
        (
            "request_timeout_ms: 9999999h\n",
            "request_timeout_ms: .*less than or equal to 3153600000000",
        ),
        ("drain_timeout_ms: 99999999999999999999\n", "drain_timeout_ms: .*less than or equal"),
        (
            "max_in_flight: 99999999999999999999\n",
            "max_in_flight: .*less than or equal to 2147483647",
        ),
        ("- port\n", "expected a mapping of keys to values, got a list"),
        ("port: [\n", "not valid YAML"),
    ],
)
def test_values_that_cannot_be_used_are_refused_with_the_reason(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(file=write(tmp_path, text))


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path / "absent.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(file=write(tmp_path, "# nothing\n")).port == 8000


def test_a_model_path_in_a_file_is_relative_to_the_file(tmp_path: Path) -> None:
    config = load(file=write(tmp_path, "model: models/tiny\n"))
    assert config.model == str(tmp_path / "models" / "tiny")


def test_auto_means_to_be_derived(tmp_path: Path) -> None:
    file = write(tmp_path, "kv_cache_bytes: auto\ntorch_threads: auto\nmax_sequence_tokens: auto\n")
    config = load(file=file)
    assert (config.kv_cache_bytes, config.torch_threads, config.max_sequence_tokens) == (
        None,
        None,
        None,
    )


def test_types_have_short_names_too(tmp_path: Path) -> None:
    config = load({"kv_cache_dtype": "fp16"}, write(tmp_path, "dtype: bf16\n"))
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "float16")
    assert load({"dtype": "fp32", "kv_cache_dtype": "fp8"}).dtype == "float32"
    with pytest.raises(ConfigError, match=r"dtype: .*'bfloat16' or 'float16', got 'int8'"):
        load({"dtype": "int8"})


def test_token_of_the_file_wins_over_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    from_environment = load(PAGEFERRY_CLUSTER_TOKEN="of the environment")
    assert from_environment.cluster_token.get_secret_value() == "of the environment"
    file = write(tmp_path, "cluster_token: of the file\n")
    config = load(file=file, PAGEFERRY_CLUSTER_TOKEN="of the environment")
    assert config.cluster_token.get_secret_value() == "of the file"
    assert "of the file" not in repr(config)
    with pytest.raises(ConfigError) as info:
        load(PAGEFERRY_CLUSTER_TOKEN="short")
    assert "short" not in str(info.value)


def test_a_token_is_minted_for_every_cluster() -> None:
    assert load().cluster_token != load().cluster_token


def test_demotion_comes_from_the_environment_unless_the_configuration_says_it(
    tmp_path: Path,
) -> None:
    tokens, iters = "1024", "3"
    config = load(PAGEFERRY_CTX_DEMOTE_UNCACHED_TOKENS=tokens, PAGEFERRY_CTX_DEMOTE_MAX_ITERS=iters)
    assert (config.ctx_demote_uncached_tokens, config.ctx_demote_max_iters) == (1024, 3)
    config = load(
        file=write(tmp_path, "ctx_demote_max_iters: 5"), PAGEFERRY_CTX_DEMOTE_MAX_ITERS=iters
    )
    assert config.ctx_demote_max_iters == 5
    assert load().ctx_demote_uncached_tokens is None
    with pytest.raises(ConfigError, match="ctx_demote_uncached_tokens"):
        load(PAGEFERRY_CTX_DEMOTE_UNCACHED_TOKENS="many")


def test_a_mistyped_variable_is_reported() -> None:
    found = environment(PAGEFERRY_CLUSTER_TOKENS="x" * 10).warnings
    assert found == (
        "environment variable PAGEFERRY_CLUSTER_TOKENS has no effect; "
        "did you mean PAGEFERRY_CLUSTER_TOKEN?",
    )


def test_cache_directory_follows_xdg() -> None:
    assert environment(XDG_CACHE_HOME="/var/cache/me").cache_directory == Path(
        "/var/cache/me/pageferry"
    )
    # The specification wants relative paths ignored.
    assert Path("/home/somebody") in environment(XDG_CACHE_HOME="here").cache_directory.parents


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("2 GB", 2_000_000_000),
        ("1.5gib", 3 << 29),
        (7, 7),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1 QB", "GiB", "1e9", "512M", "nan"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("90s", 90_000), ("1.5 m", 90_000), ("1h", 3_600_000), (20, 20)],
)
def test_durations(text: str | int, ms: int) -> None:
    assert parse_duration_ms(text) == ms


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1 << 20, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
