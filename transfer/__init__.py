"""Moves KV pages between workers: identity, compatibility, plan, sessions and transports."""
