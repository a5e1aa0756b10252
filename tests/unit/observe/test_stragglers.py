"""Simulated ranks make steps; what each measures of itself must name the one that holds the others up, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod._base.config import Config
from horovod.comm.datatypes import DataType
from horovod.core.negotiation.messages import Operation, Request, TensorSpec
from horovod.diagnose.stragglers import Submissions, delays
from horovod.observe import step_clock
from horovod.observe.flight_recorder import FlightRecorder
from horovod.observe.progress import PHASES, ProgressMeter, StepProgress, merged, overlap
from horovod.observe.step_clock import BACKWARD, DATA, FORWARD, REDUCTION, UPDATE, StepClock
from horovod.observe.stragglers import LEAST_SHARE, STEPS, StragglerWatch, describe, slowest
from part import draws

BUCKET_BYTES = 400
REDUCED_IN = 0.002
"""Seconds that each reduction takes."""


class Step(NamedTuple):
    """What a rank does in a step, in seconds."""

    data: float
    forward: float
    backward: float
    update: float


class SimulatedRank:
    """One rank by its own clock, which differs from the others'."""

    def __init__(self, offset: float, set_time: Callable[[float], None]) -> None:
        self.offset = offset
        self.clock = StepClock()
        self.recorder = FlightRecorder(2000)
        self.at = 0.0
        self.set_time = set_time
        self.meter = ProgressMeter(self.clock, offset)

    def enter(self, phase: int) -> None:
        self.set_time(self.at + self.offset)
        self.clock.enter(phase)

    def stepped(self) -> None:
        self.set_time(self.at + self.offset)
        self.clock.stepped("optimizer")


def make_step(ranks: Sequence[SimulatedRank], steps: Sequence[Step], buckets: int, hooks: bool = True) -> None:
    """All ranks make a step together: buckets are submitted during backward, and waited for at its end."""
    submitted: list[list[float]] = []
    for rank, step in zip(ranks, steps, strict=True):
        if hooks:
            rank.enter(DATA)
        rank.at += step.data
        if hooks:
            rank.enter(FORWARD)
        rank.at += step.forward
        if hooks:
            rank.enter(BACKWARD)
        times = []
        for _ in range(buckets):
            rank.at += step.backward / buckets
            times.append(rank.at)
        submitted.append(times)
        if hooks:
            rank.enter(REDUCTION)
    end = 0.0
    waits_from = [rank.at for rank in ranks]
    for bucket in range(buckets):
        request = Request(
            Operation.ALLREDUCE,
            f"bucket.{bucket}",
            (TensorSpec("", DataType.FLOAT32, (BUCKET_BYTES // 4,)),),
            caller="train.py:7",
        )
        before = end
        begin = max(end, *(times[bucket] for times in submitted))
        end = begin + REDUCED_IN
        for index, (rank, times) in enumerate(zip(ranks, submitted, strict=True)):
            record = rank.recorder.submitted(request, times[bucket] + rank.offset)
            record.agreed = record.started = begin + rank.offset
            record.ended = end + rank.offset
            record.awaited = max(waits_from[index], before) + rank.offset
    for rank, step in zip(ranks, steps, strict=True):
        rank.at = end
        if hooks:
            rank.enter(UPDATE)
        rank.at += step.update
        if hooks:
            rank.stepped()


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[SimulatedRank]]:
    return made_ranks(monkeypatch)


def made_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[SimulatedRank]]:
    now = [0.0]
    monkeypatch.setattr(step_clock, "monotonic", lambda: now[0])

    def make(count: int) -> list[SimulatedRank]:
        return [SimulatedRank(1000.0 * (rank + 1), lambda at: now.__setitem__(0, at)) for rank in range(count)]

    return make


def report(ranks: Sequence[SimulatedRank], watch: StragglerWatch) -> list[StepProgress]:
    """Every rank measures what it has done since the last time."""
    found = [each.meter.take({0: each.recorder}, each.clock.taken(), each.at + each.offset) for each in ranks]
    for rank, progress in enumerate(found):
        watch.add(rank, progress)
    return found


seconds = st.floats(0.001, 0.05)


@settings(max_examples=draws(25))
@given(
    base=st.builds(Step, seconds, seconds, seconds, seconds),
    count=st.integers(2, 5),
    slow=st.integers(0, 4),
    phase=st.integers(0, 3),
    extra=st.floats(0.0, 0.1),
    buckets=st.integers(1, 4),
    hooks=st.booleans(),
)
def test_the_slow_rank_and_its_phase_are_named(
    base: Step, count: int, slow: int, phase: int, extra: float, buckets: int, hooks: bool
) -> None:
    slow %= count
    with pytest.MonkeyPatch.context() as patch:
        ranks = made_ranks(patch)(count)
        watch = StragglerWatch(0.10)
        delayed = base._replace(**{Step._fields[phase]: base[phase] + extra})
        found = []
        for number in range(STEPS + 30):
            make_step(ranks, [delayed if rank == slow else base for rank in range(count)], buckets, hooks)
            if number % 10 == 9:
                report(ranks, watch)
                found += watch.found({0: range(count)}, float(number))
    step_seconds = sum(delayed) + buckets * REDUCED_IN
    # While the others stand, early buckets may be reduced: that time counts as communication.
    least = (extra - (buckets - 1) * REDUCED_IN) / step_seconds
    if least > 0.11:
        assert [(each.rank, each.steps >= STEPS) for each in found] == [(slow, True)]
        assert found[0].phase == (PHASES[phase] if hooks else "its own work")
        assert least - 0.01 < found[0].share < extra / step_seconds + 0.01
        assert (found[0].line, found[0].awaited[:7]) == ("train.py:7", "bucket.")
    if extra / step_seconds < 0.09:
        assert not found


def test_ranks_that_are_slow_in_turns_are_not_named(ranks_of: Callable[[int], list[SimulatedRank]]) -> None:
    ranks, watch = ranks_of(3), StragglerWatch(0.10)
    fast, late = Step(0.01, 0.01, 0.01, 0.01), Step(0.05, 0.01, 0.01, 0.01)
    found = []
    for number in range(3 * STEPS):
        make_step(ranks, [late if number % 3 == rank else fast for rank in range(3)], 2)
        if number % 9 == 8:
            report(ranks, watch)
            found += watch.found({0: [0, 1, 2]}, 0.0)
    assert not found


def test_shares_of_a_step(ranks_of: Callable[[int], list[SimulatedRank]]) -> None:
    ranks = ranks_of(2)
    for _ in range(10):
        make_step(ranks, [Step(0.01, 0.02, 0.03, 0.04), Step(0.02, 0.02, 0.03, 0.04)], 1)
    fast, slow = report(ranks, StragglerWatch(0.10))
    assert fast.phases == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.0], abs=1e-6)
    assert slow.phases == pytest.approx([0.2, 0.2, 0.3, 0.4, 0.0], abs=1e-6)
    assert (fast.waiting, slow.waiting) == pytest.approx((0.1, 0.0), abs=1e-6)
    assert [fast.communication, slow.communication] == pytest.approx([10 * REDUCED_IN] * 2)
    assert fast.seconds == pytest.approx(sum(fast.phases) + fast.communication + fast.waiting)
    assert (fast.steps, fast.collectives, fast.bytes) == (10, 10, 10 * BUCKET_BYTES)


def test_a_collective_that_goes_on_counts_in_both_stretches() -> None:
    recorder = FlightRecorder(8)
    meter = ProgressMeter(StepClock(), 0.0)
    record = recorder.submitted(Request(Operation.BARRIER, "b"), 1.0)
    first = meter.take({0: recorder}, [], 3.0)
    record.started, record.ended = 4.0, 5.0
    second = meter.take({0: recorder}, [], 6.0)
    assert (first.waiting, first.communication, first.collectives) == (2.0, 0.0, 0)
    assert (second.waiting, second.communication, second.collectives) == (1.0, 1.0, 1)
    third = meter.take({0: recorder}, [], 7.0)
    assert (third.waiting, third.communication, third.collectives) == (0.0, 0.0, 0)


def test_other_names_count_steps_when_the_first_is_gone() -> None:
    recorder = FlightRecorder(4000)
    meter = ProgressMeter(StepClock(), 0.0)

    def submit(name: str, at: float, transient: bool = False, line: str = "") -> None:
        record = recorder.submitted(Request(Operation.BARRIER, name, caller=line, transient=transient), at)
        record.started = record.ended = at

    for number in range(10):
        submit("warmup", number / 100)
    assert meter.take({0: recorder}, [], 1.0).steps == 8  # it is known as a step's name once it has come again
    for number in range(300):
        submit(f"allreduce.noname.{number}", 1 + number / 1000, True, "train.py:3")
    meter.take({0: recorder}, [], 2.0)
    for number in range(7):
        submit(f"allreduce.noname.{300 + number}", 2 + number / 1000, True, "train.py:3")
    assert meter.take({0: recorder}, [], 3.0).steps == 7


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8)


@given(spans, spans)
def test_overlap_is_what_both_cover(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    def covered(each: list[tuple[int, int]]) -> set[int]:
        return {moment for begin, end in each for moment in range(begin, end)}

    assert overlap(merged(one), merged(two)) == len(covered(one) & covered(two))
    assert overlap(merged(one), merged(one)) == len(covered(one))


def test_the_line_says_who_where_and_how_much(ranks_of: Callable[[int], list[SimulatedRank]]) -> None:
    ranks, watch = ranks_of(2), StragglerWatch(0.10)
    make_step(ranks, [Step(9.0, 0.01, 0.01, 0.008)] * 2, 1)
    report(ranks, watch)
    for _ in range(STEPS):
        make_step(ranks, [Step(0.01, 0.01, 0.01, 0.008), Step(0.01, 0.02, 0.01, 0.008)], 1)
    report(ranks, watch)
    (found,) = watch.found({0: [0, 1]}, 0.0)
    assert describe(found, "h7") == (
        "rank 1 on host h7 holds up the other ranks in forward: it takes 10.0 ms longer there than they do. It cost them "
        "20% of the last 100 steps, which took 50.0 ms each. They wait at 'bucket.0' (train.py:7)."
    )


def submissions(ranks: Sequence[SimulatedRank]) -> list[Submissions]:
    """What the recorders of all ranks say of each collective, by one clock."""
    found = []
    for records in zip(*(rank.recorder.ring for rank in ranks), strict=True):
        by_rank = list(zip(ranks, records, strict=True))
        found.append(
            Submissions(
                records[0].request.name,
                {number: record.submitted - rank.offset for number, (rank, record) in enumerate(by_rank)},
                {number: record.ended - rank.offset for number, (rank, record) in enumerate(by_rank)},
            )
        )
    return found


@settings(max_examples=draws(20))
@given(data=st.data(), count=st.integers(2, 4), hooks=st.booleans())
def test_the_diagnosis_names_the_rank_that_the_log_names(data: st.DataObject, count: int, hooks: bool) -> None:
    turns = data.draw(st.lists(st.lists(seconds, min_size=count, max_size=count), min_size=1, max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        ranks = made_ranks(patch)(count)
        for number in range(20):
            steps = [Step(0.01, 0.01, 0.01, late) for late in turns[number % len(turns)]]
            make_step(ranks, steps, 1, hooks)
        waits = {rank: each.waiting_by_set.get(0, 0.0) for rank, each in enumerate(report(ranks, StragglerWatch(0.0)))}
    waited = delays(submissions(ranks)).waited
    assert waited == pytest.approx(waits, abs=1e-6)
    log, diagnosis = (
        slowest({rank: each / ranks[0].at for rank, each in found.items()}, LEAST_SHARE) for found in (waits, waited)
    )
    assert (log and log[0]) == (diagnosis and diagnosis[0])
    assert Config().straggler_percent / 100 == LEAST_SHARE


def test_a_phase_is_named_only_if_it_explains_the_loss(ranks_of: Callable[[int], list[SimulatedRank]]) -> None:
    """Each phase of the slow rank takes a little longer, and none of them half of what the others lose."""
    ranks, watch = ranks_of(2), StragglerWatch(0.10)
    fast, slow = Step(0.01, 0.01, 0.01, 0.01), Step(0.014, 0.014, 0.014, 0.0145)
    make_step(ranks, [fast, slow], 1)
    report(ranks, watch)
    for _ in range(STEPS):
        make_step(ranks, [fast, slow], 1)
    report(ranks, watch)
    (found,) = watch.found({0: [0, 1]}, 0.0)
    assert (found.rank, found.phase, found.longer) == (1, "", 0.0)
    assert " holds up the other ranks. It cost them " in describe(found, "h")
