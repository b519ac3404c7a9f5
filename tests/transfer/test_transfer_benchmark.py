"""benchmarks.transfer: the arithmetic of its figures, and a run of it with tiny pages.

Budget: 15 s.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.report import without_out
from benchmarks.transfer.__main__ import check_lanes, main
from benchmarks.transfer.cases import (
    GOAL_TOKENS,
    Case,
    Model,
    Shape,
    cases,
    context_slots,
    generation_slots,
    rounds_of,
    streams_apart,
)
from benchmarks.transfer.content import Content
from benchmarks.transfer.instances import Places
from benchmarks.transfer.report import (
    CaseResult,
    PipelineResult,
    Round,
    missed_goals,
    most_last_chunk,
    void_reasons,
)
from kvcache_core.storage import TorchStorage

SMALL = Model(layers=2, kv_heads=4, head_dim=8, tokens_per_block=16)
EQUAL, UNEQUAL = Shape(1, 1), Shape(2, 1)


def result(case: Case, *rounds: tuple[float, float], passes: float = 0.0) -> CaseResult:
    """Of 8 GB, copied at 4 GB/s, in rounds of (raw seconds, pages' seconds)."""
    return CaseResult(
        case, 8 * 10**9, 1, tuple(Round(4.0, raw, pages, passes, 1.0, 1.5) for raw, pages in rounds)
    )


def test_the_bound_is_the_raw_message_and_the_passes() -> None:
    found = result(Case(GOAL_TOKENS, EQUAL, 1), (1.0, 5.5), passes=2.0)
    assert found.bound_ratio == pytest.approx(5.5 / (1.0 + 2 * 8 / 4))
    assert found.efficiency == pytest.approx(1 / 5.5)
    assert found.gb_s == pytest.approx(8 / 5.5)
    assert found.raw_gb_s == pytest.approx(8.0)


def test_ratios_are_those_of_the_median_round() -> None:
    found = result(Case(GOAL_TOKENS, EQUAL, 1), (1.0, 1.1), (9.0, 9.0), (1.0, 30.0))
    assert found.bound_ratio == pytest.approx(1.1)
    assert found.best_bound_ratio == pytest.approx(1.0)
    assert found.efficiency == pytest.approx(1 / 1.1)


def test_the_fields_of_a_case_are_those_of_the_issue() -> None:
    fields = result(Case(GOAL_TOKENS, UNEQUAL, 8), (2.0, 4.0), passes=1.0).fields()
    assert fields["tp"] == "2->1"
    assert (fields["tokens"], fields["streams"]) == (GOAL_TOKENS, 8)
    assert (fields["gb_s"], fields["raw_gb_s"], fields["passes"]) == (2.0, 4.0, 1.0)
    assert (fields["efficiency"], fields["bound_ratio"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("case", "device", "void"),
    [
        (Case(GOAL_TOKENS, EQUAL, 1), "cpu", True),
        (Case(GOAL_TOKENS, EQUAL, 1), "cuda", False),
        (Case(GOAL_TOKENS, EQUAL, 1, prefill=True), "cpu", False),
        (Case(GOAL_TOKENS // 8, EQUAL, 1), "cpu", False),
    ],
)
def test_a_slow_raw_message_voids_a_quiet_run_on_a_cpu(
    case: Case, device: str, *, void: bool
) -> None:
    assert len(list(void_reasons(device, [result(case, (4.1, 4.1))]))) == void
    assert not list(void_reasons(device, [result(case, (3.9, 3.9))]))


def test_goals_hold_for_long_quiet_cases() -> None:
    slow = (1.0, 1.2)
    both = list(missed_goals([result(Case(GOAL_TOKENS, EQUAL, 1), slow)], [], 0.25))
    assert ["bound ratio" in text for text in both] == [True, False]
    assert "efficiency" in both[1]
    # Where layouts differ passes have to be made.
    assert not list(
        missed_goals([result(Case(GOAL_TOKENS, UNEQUAL, 1), slow, passes=1.0)], [], 0.25)
    )
    for case in (Case(GOAL_TOKENS, EQUAL, 1, prefill=True), Case(1024, EQUAL, 1)):
        assert not list(missed_goals([result(case, slow)], [], 0.25))


def test_the_last_chunk_has_a_share_of_the_whole() -> None:
    late = PipelineResult(8192, "1->1", 512, (1.0, 2.0, 1.0), (0.3, 0.2, 0.3))
    assert late.share == pytest.approx(0.3)
    assert len(list(missed_goals([], [late], 0.25))) == 1
    assert not list(missed_goals([], [PipelineResult(8192, "1->1", 512, (1.0,), (0.24,))], 0.25))
    # Nor is a chunk asked to travel faster than all of them.
    assert not list(missed_goals([], [PipelineResult(8192, "1->1", 2048, (1.0,), (0.3,))], 0.25))


def test_goals_depend_on_what_the_ranks_run_on() -> None:
    bad = [result(Case(GOAL_TOKENS, EQUAL, 1), (1.0, 9.0))]
    late = [PipelineResult(8192, "1->1", 512, (1.0,), (0.2,))]
    assert most_last_chunk("cuda", 1) is None
    assert not list(missed_goals(bad, late, most_last_chunk("cuda", 1)))
    assert len(list(missed_goals(bad, late, most_last_chunk("cuda", 2)))) == 3
    assert len(list(missed_goals(bad, late, most_last_chunk("cpu", 1)))) == 2


def test_a_connection_over_tcp_ends_the_run() -> None:
    check_lanes("cpu", ["shm"])
    with pytest.raises(RuntimeError, match="tcp"):
        check_lanes("cpu", ["shm", "tcp"])
    with pytest.raises(RuntimeError, match="shm"):
        check_lanes("cuda:1", ["cuda_ipc", "shm"])


def test_cases_are_those_of_the_issue_and_other_ways() -> None:
    found = list(cases(EQUAL, [128, 8192, 32768], [1, 8], beside=[128]))
    quiet = [(case.tokens, case.streams) for case in found if case.way == "default"][:6]
    assert quiet == [(128, 1), (128, 8), (8192, 1), (8192, 8), (32768, 1), (32768, 8)]
    assert {case.way for case in found if case.tokens == 8192} == {
        "default",
        "staged",
        "fragmented",
    }
    assert [case.tokens for case in found if case.prefill] == [128, 128]
    assert {case.way for case in cases(UNEQUAL, [128], [1], beside=[])} == {"default"}


def test_rounds_are_as_many_as_their_bytes_allow() -> None:
    quiet, beside = Case(8192, EQUAL, 1), Case(8192, EQUAL, 1, prefill=True)
    found = [rounds_of(quiet, size, most=5, most_bytes=20.0) for size in (1, 4, 5, 9, 10, 11, 99)]
    assert found == [5, 5, 4, 2, 2, 1, 1]
    assert rounds_of(beside, 1, most=5, most_bytes=20.0) == 3
    assert rounds_of(beside, 1, most=2, most_bytes=20.0) == 2
    assert rounds_of(beside, 5, most=5, most_bytes=20.0) == 2


@pytest.mark.parametrize("pool_blocks", [12, 13])
def test_streams_have_slots_of_their_own_while_the_pools_last(pool_blocks: int) -> None:
    assert streams_apart(pool_blocks, 4, 8) == 3
    runs = [context_slots(pool_blocks, 4, stream) for stream in range(8)]
    assert len({run.tobytes() for run in runs}) == 3
    assert len(np.unique(runs)) == 12
    everything = np.arange(pool_blocks, dtype=np.int32)
    assert generation_slots(pool_blocks, everything, "default").tolist() == everything.tolist()
    moved = generation_slots(pool_blocks, everything, "fragmented")
    assert sorted(moved) == everything.tolist()
    assert not np.any(np.diff(moved) == 1)


@pytest.mark.parametrize("small", [False, True], ids=["block", "small pages"])
def test_content_is_that_of_the_heads_wherever_they_lie(*, small: bool) -> None:
    """The second of two ranks holds the second half of the heads of a rank that has all."""

    def rank(tp: int, first_head: int, page: int | None) -> tuple[torch.Tensor, Content]:
        plan = SMALL.plan(tp, page)
        storage = TorchStorage(plan, [3], "cpu")
        content = Content(SMALL, plan, storage, first_head)
        content.fill()
        return storage.pool_bytes(0, 0), content

    whole, _ = rank(1, 0, None)
    part, content = rank(2, 2, SMALL.small_page if small else None)
    # [slot, layer and role, head, half, run] against [.., half, head, run] with small pages.
    shape = (3, 4, 2, 2, SMALL.run_bytes)
    heads = part.view(shape).transpose(2, 3) if small else part.view(shape)
    assert torch.equal(whole.view(3, 4, 4, 2, SMALL.run_bytes)[:, :, 2:], heads)
    assert len(torch.unique(whole.view(-1, SMALL.run_bytes), dim=0)) == whole.numel() // (
        SMALL.run_bytes
    )
    one = np.array([1], dtype=np.int32)
    content.check(one, one)
    with pytest.raises(RuntimeError, match="slot 1: expected the bytes of the senders' slot 2"):
        content.check(one, one + 1)
    part[1, -1] ^= 1
    with pytest.raises(RuntimeError, match="slot 1"):
        content.check(one, one)
    content.erase(one)
    assert not part[1].any()
    assert part[2].any()


def figures(shape: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line of a run with tiny pages."""
    main(
        [
            *("--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--rounds", "1"),
            *("--tokens", "128", "256", "--streams", "1", "2", "--tp", shape),
            *("--beside-prefill", "128", "--chunk-tokens", "64"),
        ]
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["device"] == "cpu"
    assert found["copy_gb_s"] > 0
    assert found["main_lanes"] == ["shm"]
    assert found["void"] == []
    assert {case["tp"] for case in found["cases"]} == {shape}
    (pipeline,) = found["pipelining"]
    assert (pipeline["tp"], pipeline["last_chunk_of_bytes"]) == (shape, 0.25)
    return found


def passes(found: dict[str, Any]) -> dict[tuple[int, int, str, bool], float]:
    """By tokens, streams, way and whether beside a prefill."""
    return {
        (case["tokens"], case["streams"], case["way"], case["prefill"]): case["passes"]
        for case in found["cases"]
    }


@pytest.mark.ucx
def test_a_tiny_run_checks_every_byte(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes(figures("1->1", capsys)) == {
        (128, 1, "default", False): 0,
        (128, 2, "default", False): 0,
        (256, 1, "default", False): 0,
        (256, 2, "default", False): 0,
        # The sender's slots are neighbours and go as they lie.
        (256, 1, "staged", False): 1,
        # Pages so small go through staging where their slots are no neighbours.
        (256, 1, "fragmented", False): 1,
        (128, 1, "default", True): 0,
        (128, 2, "default", True): 0,
    }


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.parametrize("shape", ["2->1", "1->2"])
def test_several_ranks_copy_on_the_side_that_has_fewer(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(passes(figures(shape, capsys)).values()) == {1}


@pytest.mark.parametrize(
    ("gpus", "contexts", "generations"),
    [(1, [0, 0], [0, 0]), (2, [0, 0], [1, 1]), (3, [0, 0], [1, 2]), (4, [0, 1], [2, 3])],
)
def test_each_instance_has_its_own_gpus(
    gpus: int, contexts: list[int], generations: list[int]
) -> None:
    places = Places("cuda", gpus, 1)
    assert [places.gpu("context", rank) for rank in range(2)] == contexts
    assert [places.gpu("generation", rank) for rank in range(2)] == generations


def test_a_recorded_command_does_not_say_where_the_result_went() -> None:
    assert without_out(["--rounds", "5", "--out", "/here/x.json", "--tp", "2->1"]) == [
        *("--rounds", "5", "--tp", "2->1"),
    ]
    assert without_out(["--out=/here/x.json", "--out"]) == []
