"""Limits and timings of the HTTP API: plain values, decided by whoever builds the application."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Every bound on what a client may send or make the server wait for."""

    max_body_bytes: int = 8 << 20
    max_items: int = 16384
    """Of one list or object in a request body, token ids aside: checking them takes time of all."""
    body_timeout_s: float = 60.0
    """Within which a request body must have arrived."""
    request_timeout_s: float = 600.0
    """After which a generation ends, whatever happens."""
    keep_alive_s: float = 10.0
    """A stream that is silent for this long carries a comment, so that proxies keep it open."""
    write_timeout_s: float = 120.0
    """A client that takes nothing of its stream for this long has gone."""
    max_n: int = 16
    max_choices: int = 128
    """Prompts times ``n`` of one request."""
    max_stop_strings: int = 16
    max_stop_characters: int = 512
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_logprobs: int = 20
