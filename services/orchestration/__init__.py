"""Orchestration of requests: placement, both legs, order of tokens, repair, exactly one end."""
