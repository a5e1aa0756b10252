"""What a timeline comes to: the reader understands what the writer writes, and the sums are right for any collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.observe.stragglers import LEAST_SHARE
from horovod.observe.timeline import TensorLabel, Timeline
from horovod.timeline.__main__ import main
from horovod.timeline.collectives import RecordedCollective, TimelineError, read
from horovod.timeline.report import text
from horovod.timeline.summary import length, summarize, union


def recorded(
    tensor: str, submitted: dict[int, float], begun: float, ended: float, operation: str = "ALLREDUCE", size: int = 400
) -> RecordedCollective:
    return RecordedCollective(
        tensor, operation, "shm", submitted, begun, begun, ended, "float32", f"[{size // 4}]", size
    )


def test_the_reader_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path), mark_cycles=True)
    labels = [TensorLabel("a", "float32", [2, 3]), TensorLabel("b", "bfloat16", ())]
    for _ in range(2):
        for rank in (1, 0):
            timeline.ready("ALLREDUCE", labels, rank)
        timeline.cycle()
        timeline.decided(labels)
        timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", labels)
        timeline.end(labels)
    refused = [TensorLabel("refused", "int8", [1])]
    timeline.ready("ALLGATHER", refused, 0)
    timeline.decided(refused)
    open_at_the_end = [TensorLabel("open", "int8", [1])]
    timeline.ready("BROADCAST", open_at_the_end, 0)
    timeline.begin("BROADCAST", "GLOO_BCAST", "shm", open_at_the_end)
    timeline.close()
    found = read(path)
    assert [(each.tensor, each.operation, each.engine, each.data_type, each.shape, each.bytes) for each in found] == [
        ("a", "ALLREDUCE", "shm", "float32", "[2, 3]", 24),
        ("b", "ALLREDUCE", "shm", "bfloat16", "[]", 2),
    ] * 2
    for each in found:
        assert list(each.submitted) == [1, 0]
        assert max(each.submitted.values()) <= each.agreed <= each.begun <= each.ended


def test_a_tensor_that_was_submitted_before_the_recording_began(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path))
    label = [TensorLabel("a", "float32", [2])]
    timeline.decided(label)
    timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", label)
    timeline.end(label)
    timeline.close()
    (found,) = read(path)
    assert not found.submitted
    assert found.agreed == found.begun
    assert "1 tensors in 1 batches" in text(summarize([found]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("3", "is not a timeline"),
        ('[{"ph": "E", "pid": 1, "ts": 0}]', "has no collective"),
        ('[{"ph": "B", "pid": 1, "ts": 0, "name": "x"}]', "is not a timeline"),
        ('["B"]', "is not a timeline"),
        ("[]", "has no collective"),
    ],
)
def test_files_that_are_no_timelines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "timeline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TimelineError, match=message):
        read(path)
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


TIMES = st.integers(0, 200)


@given(st.lists(st.tuples(TIMES, TIMES)))
def test_unions_are_the_same_moments(pairs: list[tuple[int, int]]) -> None:
    merged = union((min(pair), max(pair)) for pair in pairs)
    ticks = {tick for pair in pairs for tick in range(min(pair), max(pair))}
    assert length(merged) == len(ticks)
    assert {tick for begin, end in merged for tick in range(int(begin), int(end))} == ticks
    flat = [edge for interval in merged for edge in interval]
    assert flat == sorted(set(flat))


@st.composite
def programs(draw: st.DrawFn) -> list[RecordedCollective]:
    """Collectives of some ranks, submitted at any times and carried out one after another."""
    ranks = draw(st.integers(1, 4))
    found: list[RecordedCollective] = []
    free = 0
    for number in range(draw(st.integers(1, 8))):
        submitted = {rank: float(draw(TIMES)) for rank in range(ranks)}
        begun = max(free, int(max(submitted.values()))) + draw(st.integers(0, 5))
        free = begun + draw(st.integers(1, 20))
        found += [recorded(f"{number}.{index}", submitted, begun, free) for index in range(draw(st.integers(1, 3)))]
    return found


@given(programs())
def test_the_phases_add_up_and_no_time_is_counted_twice(found: list[RecordedCollective]) -> None:
    summary = summarize(found)
    assert summary.carried_out + summary.waiting + summary.idle == pytest.approx(summary.seconds)
    assert min(summary.carried_out, summary.waiting, summary.idle) >= 0
    assert sum(each.bytes for each in summary.operations) == sum(each.bytes for each in found)
    assert sum(each.seconds for each in summary.operations) == pytest.approx(summary.carried_out)  # one after another
    for rank in summary.ranks:
        assert 0 <= rank.waited <= summary.seconds
        assert rank.lost <= summary.seconds
    assert text(summary)


@given(st.integers(2, 5), st.data())
def test_the_slow_rank_is_named_whatever_the_number_of_buckets(ranks: int, data: st.DataObject) -> None:
    """A rank that is 20 % late in each step is late with each bucket of the step, and loses the time once."""
    slow = data.draw(st.integers(0, ranks - 1))
    buckets = data.draw(st.integers(1, 10))
    found: list[RecordedCollective] = []
    for step in range(30):
        for bucket in range(buckets):
            ready = step * 120.0 + 50 + 40 * bucket / buckets
            submitted = {rank: ready + (20 if rank == slow else 0) for rank in range(ranks)}
            begun = max(submitted.values()) + 1
            found.append(recorded(f"bucket.{bucket}", submitted, begun, begun + 2))
    summary = summarize(found)
    assert summary.straggler == slow
    lost = next(each for each in summary.ranks if each.rank == slow)
    assert lost.lost == pytest.approx(30 * 20)
    assert f"Rank {slow} holds up the others" in text(summary)
    assert all(each.lost == 0 for each in summary.ranks if each.rank != slow)


@given(st.floats(0.6, 0.9) | st.floats(1.1, 2.0))
def test_a_slow_rank_is_named_if_it_costs_as_much_as_the_log_names(part: float) -> None:
    share = part * LEAST_SHARE
    found = [
        recorded("x", {0: 1000.0 * step + 400, 1: 1000.0 * (step + share) + 400}, 1000 * step + 950, 1000 * step + 960)
        for step in range(200)
    ]
    assert summarize(found).straggler == (1 if part > 1 else None)


def test_no_rank_is_named_if_ranks_are_late_in_turn() -> None:
    found = [
        recorded("x", {0: 10.0 * turn + (turn % 2), 1: 10.0 * turn + (turn + 1) % 2}, 10.0 * turn + 2, 10.0 * turn + 3)
        for turn in range(100)
    ]
    assert summarize(found).straggler is None


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("ALLREDUCE", 1.5), ("ALLGATHER", 3), ("BROADCAST", 1), ("ALLTOALL", 0.75), ("REDUCESCATTER", 0.75)],
)
def test_bus_bandwidth_of_four_ranks(operation: str, factor: float) -> None:
    found = [recorded("x", dict.fromkeys(range(4), 0.0), 1.0, 2.0, operation)]
    (total,) = summarize(found).operations
    assert total.bus_bytes == 400 * factor


def test_the_table_of_a_summary() -> None:
    found = [recorded(f"t{number}", {0: 0.0, 1: 0.5}, 1.0, 2.0, size=1_000_000) for number in range(12)]
    printed = text(summarize(found)).splitlines()
    assert printed[0] == "2.000 s with 2 ranks: 12 tensors in 1 batches."
    assert "carried out in 50.0%" in printed[1]
    assert "waited for others or for the agreement in 50.0%, and nothing was submitted in 0.0%" in printed[1]
    assert printed[4].split() == ["allreduce", "shm", "1", "12", "12.000", "1000.00", "12.0", "12.0"]
    assert printed[7].split() == ["0", "500.00", "25.0%", "0", "0.00"]
    assert printed[8].split() == ["1", "0.00", "0.0%", "1", "500.00", "t0"]
    assert printed[-1] == "... and 2 tensors more"


def test_the_file_is_the_json_of_chromes_trace_format(tmp_path: Path) -> None:
    """What Perfetto and chrome://tracing need: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path), mark_cycles=True)
    label = [TensorLabel("a", "float32", [2])]
    timeline.ready("ALLREDUCE", label, 0)
    timeline.cycle()
    timeline.decided(label)
    timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", label)
    timeline.end(label)
    timeline.close()
    depth: dict[int, int] = {}
    for event in json.loads(path.read_text()):
        assert isinstance(event["pid"], int)
        assert event["ph"] in ("M", "B", "E", "X", "i")
        assert event["ph"] == "E" or isinstance(event["name"], str)
        assert event["ph"] == "M" or isinstance(event["ts"], int | float)
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] in ("g", "p", "t")
        depth[event["pid"]] = depth.get(event["pid"], 0) + {"B": 1, "E": -1}.get(event["ph"], 0)
        assert depth[event["pid"]] >= 0
    assert not any(depth.values())
