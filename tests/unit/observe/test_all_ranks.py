"""The parts of a timeline of all ranks, and what puts them on one clock."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.core.negotiation.messages import Operation, Request, TensorSpec
from horovod.observe.all_ranks import AllRanksTimeline, Clocks, PartMaker, RankCollective, TimelinePart
from horovod.observe.flight_recorder import FlightRecorder


def collective(order: int, submitted: float, agreed: float) -> RankCollective:
    return RankCollective(
        0, order, order, "a", "ALLREDUCE", "float32", 4, "tcp", "", submitted, agreed, agreed, agreed, ""
    )


@given(
    offset=st.floats(-1e6, 1e6),
    collectives=st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(1e-5, 1e-2), st.floats(1e-5, 1e-2)),
        min_size=1,
        max_size=30,
    ),
)
def test_clocks_of_hosts_are_known_as_closely_as_the_collectives_bound_them(
    offset: float, collectives: list[tuple[float, float, float, float]]
) -> None:
    here, there = [], []
    narrowest = float("inf")
    for order, (one, two, way, back) in enumerate(collectives, 1):
        start = 10.0 * order
        agreed = start + max(
            one, two + way
        )  # rank 0 agrees when the member's message has come, and the member hears of it
        here.append(collective(order, start + one, agreed))
        there.append(collective(order, start + two - offset, agreed + back - offset))
        narrowest = min(narrowest, (agreed + back - start - one) + (agreed - start - two))
    clocks = Clocks("boot a")
    now = 10.0 * len(collectives) + 20
    assert clocks.offset(0, TimelinePart("boot a", now, [], here, 0), now) == 0.0
    found = clocks.offset(1, TimelinePart("boot b", now - offset, [], there, 0), now + 0.5)
    assert abs(found - offset) <= narrowest / 2 + 1e-6


def test_ranks_of_one_boot_have_one_clock_and_others_that_of_the_quickest_message() -> None:
    clocks = Clocks("a")
    assert clocks.offset(1, TimelinePart("a", 5.0, [], [], 0), 7.0) == 0.0
    assert clocks.offset(2, TimelinePart("b", 100.0, [], [], 0), 7.0) == -93.0
    assert clocks.offset(2, TimelinePart("b", 101.0, [], [], 0), 7.5) == -93.5
    assert clocks.offset(2, TimelinePart("b", 102.0, [], [], 0), 9.5) == -93.5


def request(name: str) -> Request:
    return Request(Operation.ALLREDUCE, name, (TensorSpec("", DataType.FLOAT64, (3,)),))


def test_every_collective_is_in_one_part_once_it_has_ended_and_what_is_lost_is_counted() -> None:
    recorder, parts = FlightRecorder(4), PartMaker("a")
    first = recorder.submitted(request("first"), 1.0)
    recorder.submitted(request("second"), 2.0).ended = 3.0
    assert [each.name for each in parts.make({0: recorder}, [], 4.0).collectives] == ["second"]
    first.ended = 5.0
    assert [(each.name, each.bytes) for each in parts.make({0: recorder}, [], 6.0).collectives] == [("first", 24)]
    for number in range(7):
        recorder.submitted(request(str(number)), 7.0).ended = 8.0
    part = parts.make({0: recorder}, [], 9.0)
    assert ([each.name for each in part.collectives], part.lost) == (["3", "4", "5", "6"], 3)
    assert parts.make({0: recorder}, [], 9.0).collectives == []


def test_the_file_says_what_is_missing_and_leaves_out_what_was_before_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline = AllRanksTimeline(str(path), ["h"], 10.0, "a")
    part = TimelinePart(
        "a", 12.0, [(1, 8.0, 9.0), (2, 11.0, 11.5)], [collective(1, 9.0, 9.5), collective(2, 11.0, 11.2)], 5
    )
    timeline.add(0, part, 12.0)
    timeline.close()
    shown = [(each["ph"], each["name"], each.get("ts")) for each in json.loads(path.read_text()) if each["ph"] != "M"]
    assert shown == [
        ("X", "backward", 1e6),
        ("b", "a", 1e6),
        ("e", "a", 1.2e6),
        ("X", "a", 1.2e6),
        ("i", "5 collectives came too quickly to be recorded", 2e6),
    ]
