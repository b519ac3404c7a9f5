"""Connections of a transfer agent to its peers, cached by incarnation and rank, never by address.

Dials context ranks when asked, accepts generation ranks, binds data endpoints to the peers that
were authenticated, and keeps lost pairs until nothing of them is left. A process that returns
over a new connection has closed its endpoint of the old one first: that, and its death, are the
two proofs that end a doubt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from transfer.agent_config import AgentConfig
from transfer.agent_pair import Pair, Side
from transfer.auth import AuthenticationError, mint_nonce
from transfer.control import (
    HANDSHAKE_FAILURES,
    ControlConnection,
    ControlLink,
    HandshakeError,
    PeerRefusedError,
    describe,
    prove_as_context,
    prove_as_generation,
    read_introduction,
    refuse,
)
from transfer.identity import Incarnation, PeerAddress, RankId
from transfer.messages import Introduction
from transfer.movable import check_movable
from transfer.rank_info import RankInfo
from transfer.transport import (
    OPENING_BYTES,
    Expectation,
    Transport,
    TransportAddress,
    TransportError,
)

logger = logging.getLogger(__name__)

MAX_UNPROVED: Final = 256
"""Accepted connections that have not proved the cluster token; for a newer one the oldest is
closed, so that those that say nothing hold up nobody. More than a listener accepts in one turn of
the loop (100), in which nobody can prove anything.
"""


class PeerConnector:
    """All pairs of one agent."""

    def __init__(
        self,
        *,
        info: RankInfo,
        config: AgentConfig,
        transport: Transport,
        make_pair: Callable[[Side, RankInfo], Pair],
    ) -> None:
        self.info = info
        self._refusals: dict[RankId, tuple[str, ...]] = {}
        self._config = config
        self._transport = transport
        self._make_pair = make_pair
        self._connect_s = config.timing.connect_ms / 1000
        self._pairs: dict[tuple[Side, RankId], Pair] = {}
        self._lost: list[Pair] = []
        self._dials: dict[RankId, asyncio.Task[Pair]] = {}
        self._dead: set[Incarnation] = set()
        self._unproved: dict[ControlConnection, None] = {}
        """Oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    @property
    def refusals(self) -> dict[str, tuple[str, ...]]:
        """Reasons by incarnation, of peers that this side found unfit and that may still be there.
        A copy, for any thread.
        """
        return {str(peer): reasons for peer, reasons in self._refusals.copy().items()}

    @property
    def open_pairs(self) -> tuple[Pair, ...]:
        """Pairs that work."""
        return tuple(pair for pair in tuple(self._pairs.values()) if pair.open)

    @property
    def staging_bytes(self) -> int:
        """Memory of the staging buffers of all pairs, lost ones included."""
        return sum(pair.staging_bytes for pair in (*tuple(self._pairs.values()), *self._lost))

    async def start(self) -> PeerAddress:
        """Start the transport and listen for control connections.

        Raises TransportError, and OSError where nobody can listen; nothing is left running then.
        """
        host, port = self._config.host, self._config.control_port
        await self._transport.start()
        try:
            self._server = await asyncio.start_server(self._accept_control, host, port)
        except OSError as error:
            await self._transport.close()
            raise OSError(
                f"control port {port} of {host}: {error}; give another one, or 0 for a free one"
            ) from error
        port = int(self._server.sockets[0].getsockname()[1])
        return PeerAddress(
            incarnation=self.info.incarnation, rank=self.info.rank, host=host, control_port=port
        )

    async def close(self) -> None:
        """End every pair, then the transport."""
        if self._server is not None:
            self._server.close()
        tasks = (*self._dials.values(), *self._tasks, *self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.drop_all("this worker is stopping")
        for pair in (*self._pairs.values(), *self._lost):
            await pair.torn_down.wait()
        await self._transport.close()
        # The last endings are callbacks of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def drop_all(self, reason: str) -> None:
        """Lose every peer from this side."""
        for pair in tuple(self._pairs.values()):
            pair.drop(reason)

    def open_pair(self, side: Side, peer: RankId) -> Pair | None:
        """The working pair with this rank, if there is one."""
        pair = self._pairs.get((side, peer))
        return pair if pair is not None and pair.open else None

    async def pair_with(self, address: PeerAddress) -> Pair:
        """The pair with this context rank, dialled if need be. Raises HandshakeError."""
        peer = address.rank_id
        pair = self.open_pair(Side.GENERATION, peer)
        if pair is not None:
            return pair
        if address.incarnation in self._dead:
            raise HandshakeError("this incarnation is dead; place the request elsewhere")
        refusal = self._refusals.get(peer)
        if refusal is not None:
            raise PeerRefusedError(*refusal)
        dial = self._dials.get(peer)
        if dial is None:
            dial = asyncio.get_running_loop().create_task(self._dial(address))
            self._dials[peer] = dial
            dial.add_done_callback(lambda _: self._dials.pop(peer, None))
        # One dial serves all who wait; one of them giving up must not end it.
        try:
            return await asyncio.shield(dial)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if dial.cancelled() and not (task is not None and task.cancelling()):
                raise HandshakeError("this worker is stopping") from None
            raise

    def lost(self, pair: Pair) -> None:
        """A pair was torn down."""
        key = (pair.side, pair.peer.rank_id)
        if self._pairs.get(key) is pair:
            del self._pairs[key]
        if not pair.settled:
            self._lost.append(pair)

    def is_dead(self, incarnation: Incarnation) -> bool:
        """Whether :meth:`mark_dead` was called."""
        return incarnation in self._dead

    def mark_dead(self, incarnation: Incarnation) -> None:
        """Its processes are dead: lose what is open, end what is in doubt."""
        self._dead.add(incarnation)
        for refused in tuple(self._refusals):
            if refused.incarnation == incarnation:
                del self._refusals[refused]
        for pair in tuple(self._pairs.values()):
            if pair.incarnation == incarnation:
                pair.drop(f"{incarnation} is dead")
        for pair in tuple(self._lost):
            if pair.incarnation == incarnation:
                pair.peer_dead()
        self.prune()

    def _lost_with(self, side: Side, peer: RankId) -> list[Pair]:
        return [pair for pair in self._lost if (pair.side, pair.peer.rank_id) == (side, peer)]

    def prune(self) -> None:
        """Forget lost pairs of which nothing is left."""
        self._lost = [pair for pair in self._lost if not pair.settled]

    async def _end_earlier(self, side: Side, peer: RankId) -> None:
        """Before this side shows itself over a new connection, its part of an older one is over."""
        pair = self._pairs.get((side, peer))
        earlier = self._lost_with(side, peer)
        if pair is not None:
            pair.drop("replaced by a new connection")
            earlier.append(pair)
        for old in earlier:
            await old.quiet()

    def _end_doubts(self, side: Side, peer: RankId) -> None:
        """The peer has shown itself over a new connection: its part of the older one is over."""
        for pair in self._lost_with(side, peer):
            pair.peer_dead()
        self.prune()

    # Generation side.

    async def _dial(self, address: PeerAddress) -> Pair:
        where = f"{address.host}:{address.control_port}"
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(address.host, address.control_port)
                connection = ControlConnection(reader, writer)
                try:
                    return await self._introduce_as_generation(connection, address.rank_id)
                except HANDSHAKE_FAILURES as error:
                    # The peer learns why, one of another version by the frame's header.
                    refuse(connection, *reasons_of(error))
                    raise
                except BaseException:
                    connection.close()
                    raise
        except AuthenticationError as error:
            self._refuse(address.rank_id, (str(error),))
            raise PeerRefusedError(str(error)) from error
        except HandshakeError:
            raise
        except TimeoutError as error:
            raise HandshakeError(
                f"{where}: no handshake within {self._config.timing.connect_ms} ms"
            ) from error
        except HANDSHAKE_FAILURES as error:
            raise HandshakeError(f"{where}: {describe(error)}") from error

    async def _introduce_as_generation(
        self, connection: ControlConnection, expected: RankId
    ) -> Pair:
        await prove_as_generation(connection, self._config.cluster_token)
        await self._end_earlier(Side.GENERATION, expected)
        opening = mint_nonce()
        expectation = await self._transport.expect(opening)
        data = expectation.address
        # The data listener is this peer's own.
        info = self.info.model_copy(update={"data_host": data.host, "data_port": data.port})
        try:
            connection.write(
                Introduction(
                    rank_info=info,
                    endpoint_nonce=opening,
                    meant_for=expected.incarnation,
                    meant_for_rank=expected.rank,
                )
            )
            peer = (await read_introduction(connection)).rank_info
            self._check_identity(peer, expected)
            self._check(peer)
            self._end_doubts(Side.GENERATION, expected)
            pair = self._open(Side.GENERATION, peer, connection)
        except BaseException:
            await self._abandon(expectation)
            raise
        self._spawn(self._await_endpoint(pair, expectation))
        return pair

    async def _await_endpoint(self, pair: Pair, expectation: Expectation) -> None:
        done, _ = await asyncio.wait(
            (expectation.endpoint, pair.bound),
            timeout=self._connect_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if expectation.endpoint.done():
            pair.bind(expectation.endpoint.result())
            return
        expectation.close()
        if not done:
            pair.refuse(f"no data endpoint within {self._config.timing.connect_ms} ms")

    async def _abandon(self, expectation: Expectation) -> None:
        if expectation.endpoint.done():
            await self._transport.close_endpoint(expectation.endpoint.result())
        expectation.close()

    # Context side.

    async def _accept_control(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = ControlConnection(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        self._admit(connection)
        try:
            async with asyncio.timeout(self._connect_s):
                await prove_as_context(connection, self._config.cluster_token)
                self._unproved.pop(connection, None)
                await self._introduce_as_context(connection)
        except HANDSHAKE_FAILURES as error:
            logger.warning("refused a control connection: %s", describe(error))
            refuse(connection, *reasons_of(error))
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._unproved.pop(connection, None)

    def _admit(self, connection: ControlConnection) -> None:
        if len(self._unproved) >= MAX_UNPROVED:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            # Its handshake reads the end.
            oldest.close()
        self._unproved[connection] = None

    async def _introduce_as_context(self, connection: ControlConnection) -> None:
        introduction = await read_introduction(connection)
        peer = introduction.rank_info
        if (introduction.meant_for, introduction.meant_for_rank) != (
            self.info.incarnation,
            self.info.rank,
        ):
            # It learns whom it found, and its pair with this process stays.
            connection.write(Introduction(rank_info=self.info))
            raise HandshakeError(
                f"{peer.rank_id} dials {introduction.meant_for}/{introduction.meant_for_rank}, "
                f"this is {self.info.rank_id}"
            )
        await self._end_earlier(Side.CONTEXT, peer.rank_id)
        # Shown even to a peer that does not fit: it then knows both values, too.
        connection.write(Introduction(rank_info=self.info))
        self._check(peer)
        if len(introduction.endpoint_nonce) != OPENING_BYTES:
            raise HandshakeError(
                f"endpoint nonce: expected {OPENING_BYTES} bytes, got "
                f"{len(introduction.endpoint_nonce)}"
            )
        self._end_doubts(Side.CONTEXT, peer.rank_id)
        pair = self._open(Side.CONTEXT, peer, connection)
        self._spawn(self._open_endpoint(pair, introduction.endpoint_nonce))

    async def _open_endpoint(self, pair: Pair, opening: bytes) -> None:
        address = TransportAddress(pair.peer.data_host, pair.peer.data_port)
        try:
            endpoint = await self._transport.connect(address, opening, timeout_s=self._connect_s)
        except TransportError as error:
            pair.refuse(str(error))
        else:
            pair.bind(endpoint)

    # Both.

    def _check_identity(self, peer: RankInfo, expected: RankId) -> None:
        if peer.incarnation != expected.incarnation:
            raise HandshakeError(
                f"expected {expected}, found {peer.rank_id}: the worker was restarted"
            )
        if peer.rank != expected.rank:
            raise HandshakeError(f"expected {expected}, found {peer.rank_id}; mind the addresses")

    def _check(self, peer: RankInfo) -> None:
        reasons = tuple(str(row) for row in check_movable(self.info, peer))
        self._refuse(peer.rank_id, reasons)
        if reasons:
            raise PeerRefusedError(*reasons)

    def _refuse(self, peer: RankId, reasons: tuple[str, ...]) -> None:
        """What is found of a peer now; an instance that is here again is gone as what it was."""
        for known in tuple(self._refusals):
            same_instance = known.incarnation.instance == peer.incarnation.instance
            if known == peer or (same_instance and known.incarnation != peer.incarnation):
                del self._refusals[known]
        if reasons:
            self._refusals[peer] = reasons

    def _open(self, side: Side, peer: RankInfo, connection: ControlConnection) -> Pair:
        pair = self._make_pair(side, peer)
        pair.attach(ControlLink(connection, self._config.timing, pair.received, pair.link_ended))
        self._pairs[side, peer.rank_id] = pair
        return pair

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def reasons_of(error: Exception) -> tuple[str, ...]:
    """Texts for the other side; never empty."""
    if isinstance(error, HandshakeError) and error.reasons:
        return error.reasons
    return (describe(error),)
