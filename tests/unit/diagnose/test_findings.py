"""Whatever a rank does otherwise than the rest, and whenever, the diagnosis names it and what it missed first."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.diagnose.dumped_job import DumpedJob, describe_ranks, duration, ordinal
from horovod.diagnose.findings import findings
from horovod.diagnose.report import diagnosis, text
from horovod.observe.dump import Folder, LauncherDump, RankExit
from horovod.observe.stragglers import LEAST_SHARE
from unit.diagnose.simulated import run

SIZES = st.integers(3, 6)


@st.composite
def positions(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """The number of ranks, the odd one, layers in a step, and the step and the layer in which it is odd."""
    size = draw(SIZES)
    layers = draw(st.integers(2, 5))
    return size, draw(st.integers(0, size - 1)), layers, draw(st.integers(1, 8)), draw(st.integers(0, layers - 1))


def script(layers: int, steps: int = 10) -> list[str]:
    return [f"layer{layer}" for _ in range(steps) for layer in range(layers)]


@given(positions())
def test_a_rank_that_skips_one(case: tuple[int, int, int, int, int]) -> None:
    size, odd, layers, step, layer = case
    scripts = [script(layers) for _ in range(size)]
    del scripts[odd][step * layers + layer]
    said = findings(DumpedJob(run(scripts)))[0]
    assert (said.kind, said.ranks) == ("apart", [odd])
    assert (said.collective, said.occurrence) == (f"layer{layer}", step + 1)
    assert f"skipped 'layer{layer}'" in said.text


@given(positions())
def test_a_rank_that_calls_two_in_another_order(case: tuple[int, int, int, int, int]) -> None:
    size, odd, layers, step, layer = case
    scripts = [script(layers) for _ in range(size)]
    at = step * layers + layer
    scripts[odd][at], scripts[odd][at + 1] = scripts[odd][at + 1], scripts[odd][at]
    said = findings(DumpedJob(run(scripts)))[0]
    assert (said.kind, said.ranks, said.collective) == ("apart", [odd], f"layer{layer}")
    assert "another order" in said.text


@given(positions())
def test_a_rank_that_uses_another_name(case: tuple[int, int, int, int, int]) -> None:
    size, odd, layers, step, layer = case
    scripts = [script(layers) for _ in range(size)]
    scripts[odd][step * layers + layer] = "other"
    said = findings(DumpedJob(run(scripts)))[0]
    assert (said.kind, said.ranks) == ("apart", [odd])
    assert said.collective == f"layer{layer}" and "submitted 'other' instead" in said.text


@given(positions())
def test_a_rank_that_stops_calling(case: tuple[int, int, int, int, int]) -> None:
    size, odd, layers, step, layer = case
    scripts = [script(layers) for _ in range(size)]
    del scripts[odd][step * layers + layer :]
    said = findings(DumpedJob(run(scripts)))[0]
    assert (said.kind, said.ranks, said.collective, said.occurrence) == ("silent", [odd], f"layer{layer}", step + 1)
    assert said.waiting == [rank for rank in range(size) if rank != odd]
    assert "train.py:7" in said.text


@given(positions(), st.integers(5, 30))
def test_records_that_the_ring_has_dropped_do_not_matter(case: tuple[int, int, int, int, int], ring: int) -> None:
    size, odd, layers, step, layer = case
    scripts = [script(layers) for _ in range(size)]
    del scripts[odd][step * layers + layer :]
    said = findings(DumpedJob(run(scripts, ring=ring)))[0]
    assert (said.kind, said.ranks, said.collective, said.occurrence) == ("silent", [odd], f"layer{layer}", step + 1)


def test_two_ranks_that_are_apart_for_the_first_time() -> None:
    """Nothing tells whose fault it is, so nobody is blamed."""
    said = findings(DumpedJob(run([["a", "b"], ["b", "a"]])))[0]
    assert (said.kind, said.ranks) == ("apart", [])
    assert "the order of a loop" in said.text


def test_all_is_well() -> None:
    job = DumpedJob(run([script(3)] * 3))
    assert [each.kind for each in findings(job)] == ["nothing"]


def test_all_is_well_as_text_and_for_tools() -> None:
    job = DumpedJob(run([script(3)] * 3))
    found = findings(job)
    assert "No rank waits for another, and none has failed." in text(job, found)
    assert diagnosis(job, found).silent == []
    assert len(diagnosis(job, found).ranks) == 3


def test_the_ranks_that_an_elastic_job_has_lost_before_are_named() -> None:
    folder, lost = run([script(3)] * 3), ["in round 1 rank 3 on d (process 3, exit code 1)"]
    job = DumpedJob(msgspec.structs.replace(folder, ranks={
        rank: msgspec.structs.replace(dump, lost=lost) for rank, dump in folder.ranks.items()
    }))  # fmt: skip
    assert text(job, findings(job)).endswith(f"The job had gone on without these ranks before\n  {lost[0]}")
    assert diagnosis(job, findings(job)).lost == lost


def failed(folder: Folder, rank: int, kind: str, reason: str) -> Folder:
    """The folder, as if ``rank`` had failed first."""
    ranks = {
        each: msgspec.structs.replace(dump, why="failure", failed_rank=rank, failure_kind=kind, reason=reason)
        for each, dump in folder.ranks.items()
    }
    return msgspec.structs.replace(folder, ranks=ranks)


ENDED = "its process ended without hvd.shutdown(): it crashed, was killed, or its host went away"


@pytest.mark.parametrize(
    ("killed", "number", "said"),
    [(1, 9, "has ended 1 process for lack of memory"), (0, 9, "it has counted no such case"), (-1, 11, "SIGSEGV")],
)
def test_a_killed_rank(killed: int, number: int, said: str) -> None:
    scripts = [script(2), script(2)[:5], script(2)]
    folder = failed(run(scripts), 1, "LOST", ENDED)
    ranks = {
        rank: msgspec.structs.replace(dump, killed_for_memory=killed)
        for rank, dump in folder.ranks.items()
        if rank != 1
    }
    launcher = LauncherDump(1, "job", 1, ENDED, [RankExit(1, 128 + number, number)])
    found = findings(DumpedJob(Folder(ranks, {}, launcher)))[0]
    assert (found.kind, found.ranks, found.waiting) == ("killed", [1], [0, 2])
    assert said in found.text and "Ranks 0 and 2 wait for it in 'layer1'" in found.text


def test_a_rank_that_others_have_lost_and_that_runs() -> None:
    folder = run([script(2)] * 3, clocks=[0.0, 5.0, 9.0])
    ranks = {
        rank: msgspec.structs.replace(
            dump, why="failure", failed_rank=0 if rank == 2 else 2, failure_kind="LOST", reason=ENDED
        )
        for rank, dump in folder.ranks.items()
    }
    found = findings(DumpedJob(Folder(ranks, {}, None)))[0]
    assert found.kind == "link" and "The network of host host2 is broken" in found.text


def test_only_the_launcher_knows() -> None:
    launcher = LauncherDump(1, "job", 1, "", [RankExit(1, 3)])
    found = findings(DumpedJob(Folder({}, {}, launcher)))[0]
    assert (found.kind, found.ranks) == ("lost", [1]) and "exit code 3" in found.text


@pytest.mark.parametrize(("size", "slow"), [(2, 1), (4, 0), (4, 3)])
@given(share=st.floats(0.15, 0.6))
def test_a_slow_rank(size: int, slow: int, share: float) -> None:
    compute = {rank: 0.01 if rank != slow else 0.01 / (1 - share) for rank in range(size)}
    said = findings(DumpedJob(run([script(2, 30)] * size, compute)))[0]
    assert (said.kind, said.ranks) == ("straggler", [slow])


@given(st.floats(0.6, 0.9) | st.floats(1.1, 2.0))
def test_a_slow_rank_is_named_if_it_costs_as_much_as_the_log_names(part: float) -> None:
    share = part * LEAST_SHARE
    slow = (0.01 + 0.002 * share) / (1 - share)  # two latencies pass in each step
    kinds = [each.kind for each in findings(DumpedJob(run([script(2, 30)] * 3, {1: slow})))]
    assert ("straggler" in kinds) == (part > 1)


@pytest.mark.parametrize(
    ("why", "seconds", "kind"),
    [("request", 0.01, "straggler"), ("request", 60.0, "inside"), ("stall", 0.01, "inside")],
)
def test_a_collective_that_runs_for_a_moment_hides_no_slow_rank_if_the_job_was_only_asked(
    why: str, seconds: float, kind: str
) -> None:
    folder = run([script(2, 20)] * 3, compute={1: 0.05})
    dumps = {}
    for rank, dump in folder.ranks.items():
        last = dump.collectives[-1]
        if rank == 1:
            last = msgspec.structs.replace(last, ended=None, submitted=dump.monotonic - seconds)
        dumps[rank] = msgspec.structs.replace(dump, why=why, collectives=[*dump.collectives[:-1], last])
    assert findings(DumpedJob(Folder(dumps, {}, None)))[0].kind == kind


@given(st.lists(st.integers(0, 40), min_size=1, unique=True))
def test_ranks_are_described_as_spans(ranks: list[int]) -> None:
    words = describe_ranks(ranks).partition(" ")[2].replace(" and ", ", ").split(", ")
    found = [number for part in words for number in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
    assert found == sorted(ranks)


def test_words() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 112, 812)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th", "812th",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0.25, 12.4, 130, 7320)] == ["0.25 s", "12 s", "2 min 10 s", "2 h 2 min"]
