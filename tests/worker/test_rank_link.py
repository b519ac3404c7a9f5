"""The connection between ranks, and the folder where they meet."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.support.models import write_random_model
from tests.support.rank_threads import on_ranks
from transfer.identity import Incarnation, PeerAddress
from worker.config import WorkerConfig
from worker.host import rank_process
from worker.model.errors import ModelLoadError
from worker.model.shard import Shard
from worker.oplog import LogEntries, StepChecksum
from worker.rank_facts import GroupFact, RankHello, RankLeaseEnded, RankProgress
from worker.rank_link import FollowerLink, LeaderLink, RankGone
from worker.rank_meeting import RankMeeting
from worker.transfer_log import CancelTransfer, KeepWarm, ShipTransfer

INCARNATION = Incarnation(instance="context-0", nonce="00ff")
PEER = PeerAddress(incarnation=INCARNATION, rank=1, host="127.0.0.1", control_port=7)
TINY = {"vocab_size": 32, "hidden_size": 36, "intermediate_size": 8, "num_hidden_layers": 1}
HELLO = RankHello(rank=1, peer=PEER)
ENTRIES = LogEntries(
    first_number=3,
    operations=(
        ShipTransfer(request_id="r", first_block=0, end_block=2, lease=5),
        CancelTransfer(request_id="r", reason="why not"),
        KeepWarm(peers=(PEER,)),
    ),
)


@pytest.fixture
def links() -> Iterator[tuple[FollowerLink, LeaderLink]]:
    here, there = socket.socketpair()
    leader_end, follower_end = FollowerLink(here, HELLO), LeaderLink(there)
    yield leader_end, follower_end
    leader_end.close()
    follower_end.close()


def test_the_log_goes_one_way_and_facts_the_other(links: tuple[FollowerLink, LeaderLink]) -> None:
    to_follower, to_leader = links
    heard: list[LogEntries] = []
    to_follower.apply(ENTRIES)
    facts: list[GroupFact] = [
        RankProgress(request_id="r", word="granted"),
        RankLeaseEnded(lease=5),
    ]
    reported: list[tuple[int, GroupFact]] = []
    to_leader.tell(facts[0])
    to_leader.tell(StepChecksum(step=4, checksum=9))
    to_leader.tell(facts[1])
    to_leader._connection.shutdown(socket.SHUT_WR)
    to_follower.listen(lambda rank, fact: reported.append((rank, fact)))
    assert reported == [(1, fact) for fact in facts]
    assert to_follower.checksums() == [StepChecksum(step=4, checksum=9)]
    assert to_follower.checksums() == []
    to_follower.close()
    to_leader.follow(heard.append)
    assert heard == [ENTRIES]


def test_either_end_hears_of_the_others_death(links: tuple[FollowerLink, LeaderLink]) -> None:
    to_follower, to_leader = links
    to_leader.close()
    to_follower.listen(lambda rank, fact: pytest.fail(f"{rank} {fact}"))
    with pytest.raises(RankGone, match="rank 1 is gone"):
        to_follower.apply(ENTRIES)
    with pytest.raises(RankGone, match="the leader is gone"):
        to_leader.tell(HELLO)


def test_what_a_leaders_address_tells() -> None:
    leader = PeerAddress(incarnation=INCARNATION, host="127.0.0.1", control_port=6)
    told = leader.leading([PEER])
    assert told.ranks == (leader, PEER)
    assert leader.ranks == (leader,)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_ranks_meet_in_a_folder_that_goes(temporary: Path) -> None:
    meetings = [RankMeeting(INCARNATION, Shard(rank, 3)) for rank in range(3)]
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    cpu = torch.device("cpu")
    joined = on_ranks(3, lambda ranks: meetings[ranks.shard.rank].join(cpu, "127.0.0.1").shard.rank)
    assert joined == [0, 1, 2]
    hellos = [HELLO.model_copy(update={"rank": rank}) for rank in (2, 1)]
    ends = [meetings[hello.rank].leader(hello) for hello in hellos]
    links = meetings[0].followers()
    assert [link.hello.rank for link in links] == [1, 2]
    assert not folder.exists()
    for end in ends:
        end.close()
    for link in links:
        link.close()


def test_a_folder_of_others_is_refused(temporary: Path) -> None:
    folder = temporary / f"pageferry-ranks-{INCARNATION.nonce}"
    folder.mkdir()
    os.chmod(folder, 0o755)
    with pytest.raises(PermissionError, match="expected a private folder of this user"):
        RankMeeting(INCARNATION, Shard(1, 2))


def test_ranks_that_cannot_start_leave_nothing_behind(temporary: Path) -> None:
    """A model that does not divide is refused by every rank, once they have met."""
    numbers = {"num_attention_heads": 9, "num_key_value_heads": 3}
    model = write_random_model(LlamaConfig(**TINY, **numbers), temporary / "model")
    leader = WorkerConfig(
        incarnation=INCARNATION,
        role="generation",
        model_path=str(model),
        model_name="tiny",
        cluster_token="test token",
        tensor_parallel_size=2,
    )
    processes = [
        rank_process(leader.model_copy(update={"rank": rank}), lambda line: None)
        for rank in range(2)
    ]
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(process.start) for process in processes]
        for start in starts:
            with pytest.raises(ModelLoadError, match="among 2 ranks: num_attention_heads 9"):
                start.result()
    sys.setswitchinterval(interval)
    assert list(temporary.iterdir()) == [model]
