"""Which ranks of the other instance a rank exchanges pages with, for a pair of dp groups.

Asked of the plans themselves, so that both ends agree on who waits for whom. A rank that gets no
block of a request, because context parallelism gives it none, has senders all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer.plan import TransferPlan
from transfer.rank_info import RankInfo


def senders_to(
    receiver: RankInfo, instance: Sequence[RankInfo], dp_rank: int
) -> tuple[RankInfo, ...]:
    """Ranks in dp group ``dp_rank`` of the sending instance that have pages for ``receiver``.

    ``instance`` is all of its ranks. Raises ValueError when some of the group are missing.
    """
    group = dp_group(instance, dp_rank)
    return tuple(rank for rank in group if TransferPlan.between(rank, receiver).groups)


def receivers_from(
    sender: RankInfo, instance: Sequence[RankInfo], dp_rank: int
) -> tuple[RankInfo, ...]:
    """Ranks in dp group ``dp_rank`` of the receiving instance that ``sender`` has pages for."""
    group = dp_group(instance, dp_rank)
    return tuple(rank for rank in group if TransferPlan.between(sender, rank).groups)


def granters_to(
    sender: RankInfo, instance: Sequence[RankInfo], dp_rank: int
) -> tuple[RankInfo, ...]:
    """Ranks in dp group ``dp_rank`` of the receiving instance that have sessions with ``sender``.

    Those it has pages for. The leader beside them where ``sender`` leads, since only leaders have
    first tokens, and where nobody else would: every rank of the sending group hears of a request.
    """
    receivers = receivers_from(sender, instance, dp_rank)
    if receivers and not sender.shape.leads:
        return receivers
    numbers = {rank.rank for rank in receivers}
    group = dp_group(instance, dp_rank)
    return tuple(rank for rank in group if rank.shape.leads or rank.rank in numbers)


def dp_group(instance: Sequence[RankInfo], dp_rank: int) -> list[RankInfo]:
    """Ranks of the group. Raises ValueError when some are missing or there twice."""
    group = [info for info in instance if info.shape.dp_rank == dp_rank]
    places = {(info.shape.pp_rank, info.shape.tp_rank, info.shape.cp_rank) for info in group}
    shape = instance[0].shape if instance else None
    expected = 0 if shape is None else shape.pp_size * shape.attention_tp_size * shape.cp_size
    if not group or len(places) != expected or len(group) != expected:
        raise ValueError(
            f"dp group {dp_rank} has {len(places)} of {expected} ranks; give all ranks of the "
            "instance, each once"
        )
    return group


def require_dp_group(sources: Sequence[RankInfo]) -> None:
    """Raise ValueError unless these are all ranks of one dp group of one incarnation."""
    if not sources:
        raise ValueError("a request needs the ranks of the context instance; none were given")
    if len({rank.incarnation for rank in sources}) > 1:
        names = ", ".join(str(rank.rank_id) for rank in sources)
        raise ValueError(f"the ranks of a request are of one incarnation, got {names}")
    group = dp_group(sources, sources[0].shape.dp_rank)
    if len(group) != len(sources):
        raise ValueError(
            f"expected ranks of dp group {sources[0].shape.dp_rank} alone, got ranks of others too"
        )
