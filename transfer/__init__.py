"""Moves KV pages between workers: identity, compatibility, plan, sans-IO sessions and transports."""
