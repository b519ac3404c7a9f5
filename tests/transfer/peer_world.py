"""Agents of one test on an in-process network, and the proxies before their control ports."""

from __future__ import annotations

from tests.transfer.agent_rig import Node, NodeFacts, Wire, start_node
from transfer.inprocess import Network


class World:
    """A network and every node started in it."""

    def __init__(self, *, lanes: tuple[str, ...] = ("self",)) -> None:
        self.network = Network(piece_bytes=256, lanes=lanes)
        self.nodes: list[Node] = []
        self.wires: list[Wire] = []

    async def node(self, name: str, facts: NodeFacts | None = None) -> Node:
        node = await start_node(name, self.network.transport(name), facts)
        self.nodes.append(node)
        return node

    async def wire(self, node: Node) -> Wire:
        """Put a proxy before a node's control port; ``node.address`` then names the proxy."""
        wire = Wire(node.address)
        node.address = await wire.start()
        self.wires.append(wire)
        return wire

    async def close(self) -> None:
        for node in reversed(self.nodes):
            await node.agent.close()
        for wire in self.wires:
            await wire.close()
