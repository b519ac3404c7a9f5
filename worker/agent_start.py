"""A transfer agent over one rank's pages."""

from __future__ import annotations

from collections.abc import Callable

from transfer.agent import TransferAgent
from transfer.agent_config import AgentConfig
from transfer.agent_events import AgentEvent
from transfer.deadlines import TransferLimits
from transfer.identity import PeerAddress
from transfer.lease import views_of_groups
from transfer.ucx.transport import UcxTransport
from worker.config import WorkerConfig
from worker.core import RankCore
from worker.facts import rank_infos
from worker.page_memory import StoragePages


async def start_agent(
    config: WorkerConfig,
    core: RankCore,
    deliver: Callable[[AgentEvent], None],
    pairs_changed: Callable[[], None],
) -> tuple[TransferAgent, PeerAddress]:
    """Start it in the running loop, and where peers find it. The callbacks come in the loop.

    Raises TransportError, OSError for a port that is taken.
    """
    device = core.loaded.device
    instance = rank_infos(
        core.loaded,
        core.plan,
        model_path=config.model_path,
        model_name=config.model_name,
        incarnation=config.incarnation,
    )
    memory = StoragePages(core.storage)
    agent = TransferAgent(
        rank_info=instance[config.rank],
        instance=instance,
        views=views_of_groups(core.plan),
        transport=UcxTransport(
            config.host,
            require_transport=config.require_transport,
            cuda_device=device.index if device.type == "cuda" else None,
        ),
        memory=memory,
        config=AgentConfig(
            host=config.host,
            cluster_token=config.cluster_token,
            control_port=config.control_port if config.rank == 0 else 0,
            limits=TransferLimits(floor_ms=config.transfer_timeout_ms),
            costs=memory.costs,
        ),
        deliver=deliver,
    )
    agent.watch_pairs(pairs_changed)
    return agent, await agent.start()
