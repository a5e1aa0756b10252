"""Requests that every member announces in one message, step after step: they are counted as a whole, with the same decisions as
one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.core.negotiation import negotiator as module
from horovod.core.negotiation.messages import Decision, Operation, Request, TensorSpec
from horovod.core.negotiation.negotiator import IncompleteRequest, Negotiator
from horovod.core.negotiation.ready_request import NegotiationError, ReadyRequest
from part import draws

MANY = 20


def make(name: str, rows: int = 4, transient: bool = False) -> Request:
    return Request(Operation.ALLGATHER, name, (TensorSpec(name, DataType.FLOAT32, (rows,)),), transient=transient)


def burst(step: str = "", transient: bool = False) -> list[Request]:
    return [make(f"{step}{number}", transient=transient) for number in range(MANY)]


def twice(negotiator: Negotiator, size: int, requests: list[Request]) -> None:
    """Two steps: the first defines the decisions, the second repeats them."""
    for _ in range(2):
        for member in range(size):
            negotiator.announce(member, list(requests), 0.0)
        negotiator.take()


def test_a_repeated_burst_is_ready_when_the_last_member_has_announced_it() -> None:
    negotiator, requests = Negotiator([0, 1, 2], 64), burst()
    twice(negotiator, 3, requests)
    found = []
    for _ in range(2):
        for member in (1, 0):
            negotiator.announce(member, list(requests), 1.0)
            assert not negotiator.ready and not negotiator.idle and negotiator.oldest() == 1.0
        negotiator.announce(2, list(requests), 2.0)
        assert negotiator.idle and negotiator.oldest() is None
        found.append(negotiator.take())
    assert [each.decision.name for each in found[0]] == [each.name for each in requests]
    assert not any(each.fresh for each in found[0])
    assert found[0] is found[1]  # so whoever cuts batches of it can keep them


def test_what_some_have_announced_is_seen_name_by_name() -> None:
    negotiator, requests = Negotiator([3, 5], 64), burst()
    twice(negotiator, 2, requests)
    negotiator.announce(1, list(requests), 7.0)
    waiting = negotiator.waiting()
    assert [(each.request.name, each.since, each.announced, each.missing) for each in waiting] == [
        (request.name, 7.0, [5], [3]) for request in requests
    ]
    negotiator.announce(0, list(requests), 8.0)
    assert len(negotiator.take()) == MANY and negotiator.idle


def test_a_burst_that_comes_twice_from_one_member_breaks_the_protocol() -> None:
    negotiator, requests = Negotiator([0, 1], 64), burst()
    twice(negotiator, 2, requests)
    negotiator.announce(1, list(requests), 0.0)
    with pytest.raises(NegotiationError, match="rank 1 announced '0' twice"):
        negotiator.announce(1, list(requests), 0.0)


def test_what_is_ready_besides_leaves_the_burst_as_it_is() -> None:
    negotiator, requests = Negotiator([0], 64), burst()
    twice(negotiator, 1, requests)
    for before in (0, 1):
        for number in range(before):
            negotiator.announce(0, [make(f"before {number}")], 0.0)
        negotiator.announce(0, list(requests), 0.0)
        negotiator.announce(0, [make("after")], 0.0)
        assert len(negotiator.take()) == before + MANY + 1
    negotiator.announce(0, list(requests), 0.0)
    assert len(negotiator.take()) == MANY


def test_names_of_a_burst_whose_decisions_are_not_sent_are_not_forgotten() -> None:
    negotiator, requests = Negotiator([0], MANY), burst()
    twice(negotiator, 1, requests)
    negotiator.announce(0, list(requests), 0.0)
    negotiator.announce(0, [make("another")], 0.0)
    assert negotiator.take()[-1].decision.identifier == -1


def fresh(ready: list[ReadyRequest]) -> list[str]:
    return [each.decision.name for each in ready if each.fresh]


def test_a_decision_that_has_changed_meanwhile_is_sent_again() -> None:
    negotiator, requests = Negotiator([0], 64), burst()
    twice(negotiator, 1, requests)
    negotiator.announce(0, [make("3", rows=5)], 0.0)
    assert fresh(negotiator.take()) == ["3"]
    negotiator.announce(0, list(requests), 0.0)
    assert fresh(negotiator.take()) == ["3"]


def test_a_decision_whose_number_was_given_to_another_name_is_sent_again() -> None:
    negotiator, requests = Negotiator([0], MANY), burst()
    twice(negotiator, 1, requests)
    negotiator.announce(0, [make("another")], 0.0)
    assert fresh(negotiator.take()) == ["another"]
    negotiator.announce(0, list(requests), 0.0)
    assert "0" in fresh(negotiator.take())


def test_a_burst_that_a_relay_has_a_part_in_is_counted_one_by_one() -> None:
    negotiator, requests = Negotiator([0, 1, 2], 64), burst()
    for _ in range(4):
        for request in requests:
            negotiator.announce_together(range(2, 3), request, 0.0)
        for member in (0, 1):
            negotiator.announce(member, list(requests), 0.0)
        assert len(negotiator.take()) == MANY
    for member in (2, 1, 0):
        negotiator.announce(member, list(requests), 0.0)
    assert len(negotiator.take()) == MANY


def test_names_that_never_come_again_are_not_kept() -> None:
    negotiator = Negotiator([0, 1], 64)
    for step in range(5):
        requests = burst(f"{step}.", transient=True)
        for member in (0, 1):
            negotiator.announce(member, requests, 0.0)
        assert [each.fresh for each in negotiator.take()] == [True] * MANY
    assert negotiator.remembered == 0


@settings(max_examples=draws(300), deadline=None)
@given(st.integers(1, 4), st.integers(4, 9), st.randoms(use_true_random=False))
def test_the_decisions_are_those_of_counting_one_by_one(size: int, capacity: int, source: random.Random) -> None:
    script = write_script(size, source)
    found = []
    for least in (2, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_LEAST_BURST", least)
            found.append(play(script, Negotiator(range(size), capacity)))
    assert found[0] == found[1]


def write_script(size: int, source: random.Random) -> list[tuple[str, int, list[Request]]]:
    """Some steps of a job: what happens to the coordinator, one thing after another."""
    requests = {name: make(name) for name in "abcdef"}
    script: list[tuple[str, int, list[Request]]] = []
    for _ in range(12):
        if source.random() < 0.2:  # another shape; or the same again, as another object
            name = source.choice(list(requests))
            requests[name] = make(name, source.choice([4, 5]))
        several = [*requests.values()]
        if source.random() < 0.2:
            several = source.sample(several, 4)
        if source.random() < 0.2:
            several.append(make(source.choice("xyz")))
        parts: list[tuple[str, int, list[Request]]] = []
        for member in range(size):
            cut = source.randrange(len(several)) if source.random() < 0.2 else 0
            parts += [("announce", member, each) for each in (several[:cut], several[cut:]) if each]
        if source.random() < 0.3:
            source.shuffle(parts)
        for part in parts:
            script.append(part)
            if source.random() < 0.1:
                script.append((source.choice(["look", "take"]), 0, []))
        if source.random() < 0.9:
            script.append(("take", 0, []))
    return [*script, ("take", 0, [])]


def play(script: list[tuple[str, int, list[Request]]], negotiator: Negotiator) -> list[object]:
    """What a coordinator and its members see of a script."""
    seen: list[object] = []
    known: dict[int, Decision] = {}  # of the members
    for what, member, requests in script:
        if what == "announce":
            negotiator.announce(member, list(requests), float(len(seen)))
        elif what == "look":
            seen.append(incomplete(negotiator.waiting()))
        else:
            seen.append(decided(negotiator.take(), known))
        seen.append((negotiator.idle, negotiator.oldest(), negotiator.moved, negotiator.remembered))
    return seen


def incomplete(waiting: list[IncompleteRequest]) -> list[object]:
    return sorted((each.request.name, each.since, each.announced, each.missing) for each in waiting)


def decided(ready: list[ReadyRequest], known: dict[int, Decision]) -> list[object]:
    """What a member makes of the decisions, of which it gets the numbers alone of those that are not fresh."""
    found = []
    for item in ready:
        decision = item.decision if item.fresh else known[item.decision.identifier]
        if decision.identifier >= 0:
            known[decision.identifier] = decision
        found.append((decision.name, decision.rows, decision.error, item.size))
    return sorted(found)
