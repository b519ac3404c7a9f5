"""The workers that this front end knows, and whether they can serve.

Membership comes as whole lists. A worker that leaves the list, or whose connection ends, turns into
an event for every request on it at once. The cluster holds links and answers questions; what
becomes of requests is the listener's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

from typing_extensions import override

from router.snapshots import WorkerSnapshot
from services.orchestration.api import ModelLimits, WorkerPair, WorkerStatus
from services.orchestration.arrivals import Arrivals, missing_pairs
from services.orchestration.worker_link import LinkListener, LinkState, LinkTimings, WorkerLink
from transfer.identity import Incarnation
from worker.config import WorkerAddress
from worker.messages import StepOutput, Warm, WorkerGauges, WorkerRole


class ClusterListener(Protocol):
    """Who is told about workers. Called in the event loop; must not block."""

    def worker_joined(self, worker: Incarnation) -> None:
        """A worker became ready for new requests."""

    def worker_step(self, worker: Incarnation, output: StepOutput) -> None:
        """One step of a worker."""

    def worker_lost(self, worker: Incarnation) -> None:
        """Its connection ended, and every leg on it."""

    def worker_removed(self, worker: Incarnation) -> None:
        """The incarnation left the cluster for good."""


class Cluster(LinkListener):
    """Links by incarnation."""

    def __init__(
        self,
        listener: ClusterListener,
        *,
        front_end: str,
        cluster_token: str,
        timings: LinkTimings,
        expected_instances: tuple[str, ...] = (),
    ) -> None:
        self._listener = listener
        self._front_end = front_end
        self._cluster_token = cluster_token
        self._timings = timings
        self._unseen = set(expected_instances)
        self._roles: dict[str, WorkerRole] = {}
        """Of every instance there ever was."""
        self._links: dict[Incarnation, WorkerLink] = {}
        self._limits: ModelLimits | None = None
        self._arrivals = Arrivals(timings.pairs_s, self._arrived)
        self._closing: set[asyncio.Task[None]] = set()

    def set_workers(self, addresses: Iterable[WorkerAddress]) -> None:
        """The cluster consists of these workers, all of them and no others."""
        wanted = {address.incarnation: address for address in addresses}
        self._roles |= {name.instance: address.role for name, address in wanted.items()}
        for incarnation in tuple(self._links):
            if incarnation not in wanted:
                link = self._links.pop(incarnation)
                link.disconnect()
                self._arrivals.remove(incarnation)
                task = asyncio.get_running_loop().create_task(self._remove(link))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for incarnation, address in wanted.items():
            if incarnation not in self._links:
                link = WorkerLink(
                    address,
                    self,
                    front_end=self._front_end,
                    cluster_token=self._cluster_token,
                    timings=self._timings,
                )
                self._links[incarnation] = link
                link.start()
        self._introduce(self._links.values())
        self._arrivals.look(self._links.values())

    async def close(self) -> None:
        """End every connection."""
        self._arrivals.close()
        links = tuple(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def link(self, worker: Incarnation) -> WorkerLink | None:
        """The link to a worker to which commands can be sent."""
        link = self._links.get(worker)
        return link if link is not None and link.up else None

    def links(self) -> Iterator[WorkerLink]:
        """Every known worker."""
        yield from self._links.values()

    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """Workers that a request could be placed on: connected, whether accepting or not."""
        return tuple(
            _snapshot(link, accepting=self._serves(link))
            for link in self._links.values()
            if link.up
        )

    def limits(self) -> ModelLimits | None:
        """The smallest limits of the workers that are connected, or that last were."""
        welcomes = [link.welcome for link in self._links.values() if link.up and link.welcome]
        if welcomes:
            self._limits = ModelLimits(
                model=welcomes[0].model,
                max_sequence_tokens=min(entry.max_sequence_tokens for entry in welcomes),
                vocab_size=min(entry.vocab_size for entry in welcomes),
                tokens_per_block=welcomes[0].tokens_per_block,
            )
        return self._limits

    def missing(self) -> tuple[str, ...]:
        """Why no request can be served; empty when one can.

        Any worker can serve a request alone, but a service that starts waits for all of its own.
        """
        reasons = self._not_arrived()
        if not self.can_serve():
            reasons.extend(self.degraded())
        blocks = {link.welcome.tokens_per_block for link in self._links.values() if link.welcome}
        if len(blocks) > 1:
            sizes = ", ".join(map(str, sorted(blocks)))
            reasons.append(f"workers disagree about tokens_per_block: {sizes}")
        models = {link.welcome.model for link in self._links.values() if link.welcome}
        if len(models) > 1:
            reasons.append(f"workers serve different models: {', '.join(sorted(models))}")
        return tuple(reasons)

    def degraded(self) -> tuple[str, ...]:
        """Roles that no worker is ready for, and of the others the instances that are not.

        While there is a worker at all, it covers the rest.
        """
        serving = [link for link in self._links.values() if self._serves(link)]
        ready = {link.incarnation.instance for link in serving}
        roles = {self._roles[name] for name in ready}
        needed = () if "aggregated" in roles else ("context", "generation")
        away = [
            f"instance {name} is not ready"
            for name, role in sorted(self._roles.items())
            if role in roles and name not in ready and name not in self._unseen
        ]
        apart = [str(pair) for pair in missing_pairs(serving)]
        gone = [f"no {role} worker is ready" for role in needed if role not in roles]
        return (*gone, *away, *apart)

    def can_serve(self) -> bool:
        """Whether at least one worker accepts requests."""
        return any(self._serves(link) for link in self._links.values())

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Every known worker, by name, and every instance that has none now."""
        there = {link.incarnation.instance for link in self._links.values()}
        found = [_status(link, serves=self._serves(link)) for link in self._links.values()]
        found += [_gone(name, role) for name, role in self._roles.items() if name not in there]
        return tuple(sorted(found, key=lambda status: (status.instance, status.incarnation)))

    @override
    def link_up(self, link: WorkerLink) -> None:
        """Its own peer address is known from here on."""
        match link.address.role:
            case "context":
                self._introduce(self._links.values())
            case "generation":
                self._introduce((link,))
            case "aggregated":
                pass

    @override
    def link_changed(self, link: WorkerLink) -> None:
        if not link.ready:
            self._arrivals.forget(link.incarnation)
        elif link.incarnation in self._arrivals:
            self._listener.worker_joined(link.incarnation)
        self._arrivals.look(self._links.values())

    @override
    def link_step(self, link: WorkerLink, output: StepOutput) -> None:
        self._listener.worker_step(link.incarnation, output)
        if output.gauges is not None and self._arrivals.outstanding:
            self._arrivals.look(self._links.values())

    @override
    def link_lost(self, link: WorkerLink) -> None:
        self._listener.worker_lost(link.incarnation)

    def _serves(self, link: WorkerLink) -> bool:
        """Ready by its own word, and its pairs were waited for."""
        return link.ready and link.incarnation in self._arrivals

    def _arrived(self, worker: Incarnation) -> None:
        self._unseen.discard(worker.instance)
        self._listener.worker_joined(worker)

    def _not_arrived(self) -> list[str]:
        """Why the service has not started yet."""
        waiting = {link.incarnation.instance for link in self._links.values() if link.ready}
        reasons = [
            f"instance {name} has not come up yet" for name in sorted(self._unseen - waiting)
        ]
        if self._unseen & waiting:
            reasons += [str(pair) for pair in missing_pairs(self._links.values())]
        return reasons

    def _introduce(self, workers: Iterable[WorkerLink]) -> None:
        """Name all context workers to the generation workers among these: they dial."""
        peers = tuple(
            link.welcome.peer
            for link in self._links.values()
            if link.address.role == "context" and link.welcome is not None
        )
        for link in workers:
            if link.up and link.address.role == "generation":
                link.send(Warm(peers=peers))

    async def _remove(self, link: WorkerLink) -> None:
        await link.close()
        self._listener.worker_removed(link.incarnation)


def _tokens(gauges: WorkerGauges | None, link: WorkerLink, blocks: int) -> int:
    if gauges is None or link.welcome is None:
        return 0
    return blocks * link.welcome.tokens_per_block


def _snapshot(link: WorkerLink, *, accepting: bool) -> WorkerSnapshot:
    gauges = link.gauges
    return WorkerSnapshot(
        incarnation=link.incarnation,
        role=link.address.role,
        accepting=accepting,
        total_tokens=_tokens(gauges, link, gauges.total_blocks if gauges else 0),
        free_tokens=_tokens(gauges, link, gauges.free_blocks if gauges else 0),
        running=gauges.running if gauges else 0,
        waiting=gauges.waiting if gauges else 0,
    )


def _gone(instance: str, role: WorkerRole) -> WorkerStatus:
    return WorkerStatus(
        instance=instance,
        incarnation="",
        role=role,
        state="gone",
        ready=False,
        reason="its process is gone, and the next one is not up yet",
    )


def _status(link: WorkerLink, *, serves: bool) -> WorkerStatus:
    gauges = link.gauges
    state = link.state if link.state is not LinkState.CLOSED else LinkState.CONNECTING
    reason = link.reason
    if not reason and not serves:
        waits = "waits for its transfer pairs" if link.ready else "not ready yet"
        reason = (gauges.reason if gauges else "") or waits
    return WorkerStatus(
        instance=link.incarnation.instance,
        incarnation=str(link.incarnation),
        role=link.address.role,
        state=state.value,
        ready=serves,
        reason=reason,
        transport=link.welcome.transport if link.welcome else "",
        kv_dtype=link.welcome.kv_dtype if link.welcome else "",
        running=gauges.running if gauges else 0,
        waiting=gauges.waiting if gauges else 0,
        total_blocks=gauges.total_blocks if gauges else 0,
        free_blocks=gauges.free_blocks if gauges else 0,
        cached_blocks=gauges.cached_blocks if gauges else 0,
        quarantined_blocks=gauges.quarantined_blocks if gauges else 0,
        transfers_in_flight=gauges.transfers_in_flight if gauges else 0,
        staging_bytes=gauges.staging_bytes if gauges else 0,
        pairs=_pairs(gauges),
    )


def _pairs(gauges: WorkerGauges | None) -> tuple[WorkerPair, ...]:
    if gauges is None:
        return ()
    return tuple(
        WorkerPair(pair.side, f"{pair.peer}/{pair.rank}", pair.lane, pair.reason)
        for pair in gauges.pairs
    )
