"""Moments of a transfer between two agents in which tests interfere."""

from __future__ import annotations

import asyncio

from tests.transfer.agent_rig import Node, Transfer, fill, granted
from transfer.agent_events import AnnounceReceived, ChunkReceived, GrantReceived


async def cancel_at(
    stage: str, who: str, transfer: Transfer, context: Node, generation: Node
) -> None:
    """Bring ``transfer`` to ``stage`` (``granted``, ``announced``, ``ready``, ``early`` or
    ``shipping``), then have ``who`` (``context``, ``generation`` or ``both``) cancel it.
    """
    name = transfer.request_id
    fill(context.memory, transfer.source_slots, 1)
    generation.agent.grant(name, (context.address,), 100, 20_000)
    await context.engine.expect(GrantReceived, name)
    if stage != "granted":
        context.agent.announce(name)
        await generation.engine.expect(AnnounceReceived, name)
    if stage in ("ready", "shipping"):
        transfer.give_pages(generation)
    if stage in ("shipping", "early"):
        transfer.ship(context)
    if stage == "shipping":
        await generation.engine.expect(ChunkReceived, name)
    if who in ("context", "both"):
        context.agent.cancel(name, "not wanted")
    if who in ("generation", "both"):
        generation.agent.cancel(name, "not wanted")


async def to_mid_transfer(context: Node, generation: Node, transfer: Transfer) -> None:
    """The first chunk of 20 blocks is in, the second one is under way."""
    name = transfer.request_id
    fill(context.memory, transfer.source_slots, 1)
    await granted(context, generation, name, 20_000)
    transfer.give_pages(generation)
    transfer.ship_chunk(context, 0)
    await generation.engine.expect(ChunkReceived, name)
    transfer.ship_chunk(context, 1)
    target = generation.memory.pools[0, 0][transfer.target_slots[20]]
    while not target.any():  # noqa: ASYNC110 (memory raises no event)
        await asyncio.sleep(0)
