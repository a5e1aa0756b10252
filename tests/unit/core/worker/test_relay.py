"""Relays change nothing: whatever the ranks of several hosts do, all follow one order, and it is what they would be told if
every one of them were connected with the coordinator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.core.negotiation.host_tally import HELD_SECONDS
from horovod.core.negotiation.messages import Leave, MessageError, Relayed, Share, encode
from horovod.core.negotiation.ready_request import NegotiationError
from horovod.core.negotiation.tree import Tree
from horovod.core.worker import relay
from part import draws
from unit.core.worker.tree_simulation import GLOBAL, Action, Marks, SimulatedSet, request_of

NAMES = ("a", "b", "c")
KINDS = {"a": "allreduce", "b": "allgather", "c": "alltoall", "t": "transient", "s": "some"}


class Clock:
    """In place of ``time`` in the relay's module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(relay, "time", made)
    return made


@st.composite
def programs(draw: st.DrawFn, size: int, leaves: bool) -> list[list[Action]]:
    """What each rank does: rounds of names, in any order on each rank; between them some join, and one may leave."""
    found: list[list[Action]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
        deviant = draw(st.one_of(st.none(), st.none(), st.integers(0, size - 1)))  # who submits something else
        absent = draw(st.sets(st.integers(0, size - 1), max_size=size - 1)) if draw(st.booleans()) else set()
        for member in range(size):
            if member in absent:
                continue
            order = draw(st.permutations(names)) if draw(st.booleans()) else names
            for name in order:
                variant = int(member == deviant)
                found[member].append(Action(KINDS[name], name, variant, draw(st.booleans())))
        if absent or draw(st.booleans()):
            for member in range(size):
                found[member].append(Action("join", "join.noname"))
    if draw(st.booleans()):  # some wait for what others never submit
        for member in draw(st.sets(st.integers(0, size - 1))):
            found[member].append(Action("allreduce", "late"))
    if leaves:
        for member in draw(st.sets(st.integers(0, size - 1), min_size=1)):
            found[member].append(Action("leave", "leave"))
    return found


hosts_of_some_ranks = st.lists(st.sampled_from("xyz"), min_size=2, max_size=8)


def flat_set(size: int, what: Sequence[Sequence[Action]]) -> SimulatedSet:
    """The same ranks without relays, one thing happening after another."""
    made = SimulatedSet(["x"] * size, what, 1024)
    made.run(lambda choices: 0)
    return made


@settings(deadline=None, max_examples=draws(100))
@given(data=st.data())
def test_ranks_are_told_the_same_with_relays_as_without(data: st.DataObject) -> None:
    hosts = data.draw(hosts_of_some_ranks, label="hosts")
    what = data.draw(programs(len(hosts), leaves=False), label="programs")
    chance = random.Random(data.draw(st.integers(0, 1 << 16), label="seed"))
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "time", clock)
        tree = SimulatedSet(hosts, what, data.draw(st.sampled_from((0, 2, 1024)), label="capacity"))
        timelines = data.draw(st.booleans(), label="timelines")
        ticks = data.draw(st.sampled_from((0.0, 0.01, 0.5)), label="seconds between events")

        def choose(choices: int) -> int:
            clock.now += ticks
            if timelines and chance.random() < 0.1:
                observer = tree.coordinator.observer
                observer.timeline = None if observer.timeline else Marks()  # type: ignore[assignment]
            return chance.randrange(choices)

        tree.run(choose)
        clock.now += HELD_SECONDS
        tree.step_all()
        tree.run(choose)
    flat = flat_set(len(hosts), what)
    orders = [[decision.name for decision in rank.decisions] for rank in tree.ranks]
    assert all(order == orders[0] for order in orders)
    assert tree.outcomes() == flat.outcomes()
    assert tree.waiting() == flat.waiting()


@settings(deadline=None, max_examples=draws(60))
@given(data=st.data())
def test_all_ranks_stop_at_one_place_when_one_leaves(data: st.DataObject) -> None:
    hosts = data.draw(hosts_of_some_ranks, label="hosts")
    what = data.draw(programs(len(hosts), leaves=True), label="programs")
    chance = random.Random(data.draw(st.integers(0, 1 << 16), label="seed"))
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(relay, "time", clock)
        tree = SimulatedSet(hosts, what, 1024)
        tree.run(chance.randrange)
        clock.now += HELD_SECONDS
        tree.step_all()
        tree.run(chance.randrange)
    leavers = {member for member, rank in enumerate(tree.ranks) if rank.left}
    stops = {rank.stop.rank if rank.stop is not None else None for rank in tree.ranks}
    assert stops == {None} if not leavers else stops <= {GLOBAL + member for member in leavers} and len(stops) == 1
    orders = [[decision.name for decision in rank.decisions] for rank in tree.ranks]
    assert all(order == orders[0] for order in orders)
    # What was decided before is what would have been decided without anybody leaving.
    stay = [[action for action in program if action.kind != "leave"] for program in what]
    for ours, theirs in zip(tree.outcomes(), flat_set(len(hosts), stay).outcomes(), strict=True):
        for name, decisions in ours.items():
            assert decisions == theirs[name][: len(decisions)]


def gradients(number: int, kind: str = "allreduce") -> list[Action]:
    return [Action(kind, f"gradient.{index}", together=index < number - 1) for index in range(number)]


@pytest.mark.parametrize("kind", ["allreduce", "some"])
def test_the_coordinator_hears_a_host_once(clock: Clock, kind: str) -> None:
    """Also for requests on device memory in which every second rank takes part."""
    made = SimulatedSet([f"host{member // 4}" for member in range(16)], [gradients(20, kind) * 3] * 16, 1024)
    heard: Counter[int] = Counter()
    receive = made.coordinator.receive

    def counting(member: int, body: bytes) -> None:
        heard[member] += 1
        receive(member, body)

    made.coordinator.receive = counting  # type: ignore[method-assign]
    made.run(lambda choices: 0)
    assert [len(rank.decisions) for rank in made.ranks] == [60] * 16
    assert set(heard) == {1, 2, 3, 4, 8, 12} - ({1, 3} if kind == "some" else set())
    assert heard[4] == heard[8] == heard[12] == 3  # one message a step


def test_a_name_that_not_all_ranks_of_a_host_announce_goes_up_after_a_second(clock: Clock) -> None:
    late = [Action("allreduce", "late")]
    made = SimulatedSet(["x", "x", "y", "y", "y"], [late, late, late, [], late], 1024)
    made.run(lambda choices: 0)
    assert made.waiting() == {("late", (GLOBAL, GLOBAL + 1), (GLOBAL + 2, GLOBAL + 3, GLOBAL + 4))}
    due = made.ranks[2].role.milliseconds()
    assert due is not None and 0 < due <= HELD_SECONDS * 1000
    clock.now += HELD_SECONDS
    made.step_all()
    made.run(lambda choices: 0)
    assert made.waiting() == {("late", (GLOBAL, GLOBAL + 1, GLOBAL + 2, GLOBAL + 4), (GLOBAL + 3,))}
    assert made.ranks[2].role.milliseconds() is None


def test_a_timeline_shows_each_rank(clock: Clock) -> None:
    made = SimulatedSet(["x", "x", "y", "y"], [gradients(3)] * 4, 1024)
    marks = made.coordinator.observer.timeline = Marks()  # type: ignore[assignment]
    made.step_all()
    made.run(lambda choices: choices - 1)
    expected = Counter((member, f"gradient.{index}") for member in range(4) for index in range(3))
    assert Counter(marks.ready_marks) == expected  # type: ignore[attr-defined]


def test_a_relay_speaks_for_its_host_alone(clock: Clock) -> None:
    made = SimulatedSet(["x", "x", "y", "y"], [[]] * 4, 1024)
    with pytest.raises(MessageError, match="not of its host"):
        made.coordinator.receive(2, encode(Relayed([Share(1, [])])))
    with pytest.raises(MessageError, match="not of its host"):
        made.coordinator.receive(2, encode(Leave("it left", [], 1)))
    with pytest.raises(MessageError, match="not of its host"):
        made.coordinator.receive(1, encode(Relayed([Share(-1, [])])))
    with pytest.raises(MessageError, match="never defined"):
        made.coordinator.receive(2, encode(Relayed([Share(-1, [0])])))
    with pytest.raises(MessageError, match="neither a relay"):
        made.ranks[2].role.receive(3, encode(Relayed([])))


def test_a_rank_that_announces_a_name_twice_is_found_by_its_relay(clock: Clock) -> None:
    made = SimulatedSet(["x", "y", "y", "y"], [[]] * 4, 1024)
    request = request_of(Action("allreduce", "a"), 2, 4)
    made.ranks[2].role.announce([request])
    made.ranks[2].role.announce([request])
    first, second = made.wires[2, 1]
    made.ranks[1].role.receive(2, first)
    with pytest.raises(NegotiationError, match="twice"):
        made.ranks[1].role.receive(2, second)


def test_announcements_after_another_thread_has_joined_count(clock: Clock) -> None:
    decided = []
    for hosts in ("xxxx", "xyyy"):
        made = SimulatedSet(
            hosts, [[Action("join", "join.noname")] if member == 2 else [] for member in range(4)], 1024
        )
        made.run(lambda choices: 0)
        for member in (2, 0, 1, 3):
            made.ranks[member].role.announce([request_of(Action("allgather", "b", 1), member, 4)])
            made.step_all()
            made.run(lambda choices: 0)
        decided.append([(each.name, each.rows) for each in made.ranks[3].decisions])
    assert decided[0] == decided[1] == [("b", ((1, 2, 3, 1),))]


@given(hosts_of_some_ranks)
def test_every_rank_has_one_way_to_the_coordinator(hosts: list[str]) -> None:
    tree = Tree(hosts)
    numbers = count()
    pending, seen = [0], []
    while pending and next(numbers) <= len(hosts):
        seen.append(pending.pop())
        pending += tree.children(seen[-1])
    assert sorted(seen) == list(range(len(hosts)))
    for member in range(1, len(hosts)):
        parent = tree.parent(member)
        assert member in tree.children(parent)
        assert parent == 0 or (hosts[parent] == hosts[member] and parent in tree.children(0))
    spoken_for = [each for child in tree.children(0) for each in tree.group(child)]
    assert sorted(spoken_for) == list(range(1, len(hosts)))
    assert len(tree.children(0)) == len(set(hosts)) - 1 + hosts.count(hosts[0]) - 1


def test_there_are_no_relays_where_they_spare_little() -> None:
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 3
    assert Tree(hosts, 5).children(0) == [1, 2, 3, 4, 8]
    assert Tree(hosts, 6).children(0) == list(range(1, 11)) and Tree(hosts, 6).parent(5) == 0
