"""The coordinator's reasoning, with simulated members: each name decided once a round, in order, the same for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.fusion import fuse
from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Operation,
    Order,
    Request,
    TensorSpec,
    decode_from_coordinator,
    decode_from_member,
    encode,
)
from horovod.core.negotiation.negotiator import Negotiator
from horovod.core.negotiation.ready_request import NegotiationError, ReadyRequest
from horovod.core.negotiation.request_dictionary import RequestDecoder, RequestEncoder
from part import draws


def make(
    name: str,
    operation: Operation = Operation.ALLREDUCE,
    shape: tuple[int, ...] = (4,),
    data_type: DataType = DataType.FLOAT32,
    transient: bool = False,
    **fields: Any,
) -> Request:
    spec = TensorSpec(name, data_type, shape)
    return Request(operation, name, (spec,), transient=transient, **fields)


def announce_all(negotiator: Negotiator, size: int, *requests: Request) -> list[ReadyRequest]:
    for request in requests:
        for member in range(size):
            negotiator.announce(member, [request], 0.0)
    return negotiator.take()


def is_idle(negotiator: Negotiator) -> bool:
    """Whether no name is incomplete and no member has joined."""
    return negotiator.idle


JOIN = Request(Operation.JOIN, "join.noname", transient=True)


# One name at a time


def test_nothing_is_decided_before_the_last_member_has_announced() -> None:
    negotiator = Negotiator([0, 1, 2], 8)
    assert is_idle(negotiator)
    for member in (2, 0):
        negotiator.announce(member, [make("a")], 1.0)
        assert negotiator.take() == []
        assert not is_idle(negotiator)
    negotiator.announce(1, [make("a")], 2.0)
    (ready,) = negotiator.take()
    assert ready.decision == Decision(ready.decision.identifier, "a", Operation.ALLREDUCE)
    assert ready.size == 16
    assert ready.fresh
    assert negotiator.take() == []
    assert is_idle(negotiator)


def test_decisions_come_in_the_order_in_which_names_were_completed() -> None:
    negotiator = Negotiator([0, 1], 8)
    for name in "abc":
        negotiator.announce(0, [make(name)], 0.0)
    for name in "cab":
        negotiator.announce(1, [make(name)], 0.0)
    assert [ready.decision.name for ready in negotiator.take()] == ["c", "a", "b"]


def test_a_repeated_decision_is_sent_by_its_number() -> None:
    negotiator = Negotiator([0, 1], 8)
    request = make("a")
    (first,) = announce_all(negotiator, 2, request)
    (second,) = announce_all(negotiator, 2, request)
    (third,) = announce_all(negotiator, 2, make("a"))  # says the same, is another object
    assert (first.fresh, second.fresh, third.fresh) == (True, False, False)
    assert first.decision == second.decision == third.decision
    assert first.decision.identifier >= 0


def test_a_changed_decision_is_sent_in_full_with_its_old_number() -> None:
    negotiator = Negotiator([0, 1], 8)
    (before,) = announce_all(negotiator, 2, make("a", shape=(4,)))
    (after,) = announce_all(negotiator, 2, make("a", shape=(5,)))
    (again,) = announce_all(negotiator, 2, make("a", shape=(5,)))
    assert (after.fresh, after.size, again.fresh) == (True, 20, False)
    assert before.decision.identifier == after.decision.identifier == again.decision.identifier


def test_rows_that_change_are_told_anew() -> None:
    negotiator = Negotiator([0, 1], 8)

    def gather(*rows: int) -> ReadyRequest:
        for member, count in enumerate(rows):
            negotiator.announce(member, [make("a", Operation.ALLGATHER, (count, 2))], 0.0)
        (ready,) = negotiator.take()
        return ready

    first, second, third = gather(3, 1), gather(3, 1), gather(3, 0)
    assert first.decision.rows == ((3, 1),)
    assert first.size == 4 * 2 * 4  # what arrives, not what one rank sends
    assert (first.fresh, second.fresh, third.fresh) == (True, False, True)
    assert third.decision.rows == ((3, 0),)


def test_each_member_gets_its_column_of_the_splits() -> None:
    negotiator = Negotiator([0, 1], 8)
    negotiator.announce(1, [make("a", Operation.ALLTOALL, (3,), splits=(1, 2))], 0.0)
    negotiator.announce(0, [make("a", Operation.ALLTOALL, (4,), splits=(4, 0))], 0.0)
    (ready,) = negotiator.take()
    assert [ready.received_by(member) for member in (0, 1)] == [(4, 1), (0, 2)]
    assert ready.decision.received == (4, 1) and ready.for_all().received == () and ready.decision.longest == 4
    assert ready.key is None


def test_members_of_a_group_are_gathered_each_by_its_rows() -> None:
    negotiator = Negotiator([0, 1], 8)
    for member in (0, 1):
        specs = (TensorSpec("g1", DataType.FLOAT32, (member, 2)), TensorSpec("g2", DataType.FLOAT32, (5 - member,)))
        negotiator.announce(member, [Request(Operation.ALLGATHER, "g", specs)], 0.0)
    (ready,) = negotiator.take()
    assert ready.decision.rows == ((0, 1), (5, 4))


def test_a_disagreement_is_an_error_for_all_and_leaves_nothing_behind() -> None:
    negotiator = Negotiator([3, 5], 8)
    announce_all(negotiator, 2, make("a"))
    negotiator.announce(0, [make("a", shape=(1,))], 0.0)
    negotiator.announce(1, [make("a", shape=(2,))], 0.0)
    (ready,) = negotiator.take()
    assert "Mismatched ALLREDUCE tensor shapes" in ready.decision.error
    assert "rank 3:" in ready.decision.error
    assert (ready.decision.identifier, ready.key, ready.fresh) == (-1, None, True)
    assert is_idle(negotiator)
    (ready,) = announce_all(negotiator, 2, make("a", shape=(2,)))
    assert (ready.decision.error, ready.fresh) == ("", True)


def test_names_that_will_not_come_again_take_no_place() -> None:
    negotiator = Negotiator([0, 1], 1)
    for number in range(5):
        (ready,) = announce_all(negotiator, 2, make(f"t{number}", transient=True))
        assert (ready.decision.identifier, ready.fresh) == (-1, True)
    assert not negotiator.remembered
    (ready,) = announce_all(negotiator, 2, make("kept"))
    assert ready.decision.identifier == 0


def test_without_a_cache_everything_is_told_in_full() -> None:
    negotiator = Negotiator([0, 1], 0)
    for _ in range(3):
        (ready,) = announce_all(negotiator, 2, make("a"))
        assert (ready.decision.identifier, ready.fresh) == (-1, True)
    assert not negotiator.remembered


def test_beyond_the_capacity_old_names_make_room() -> None:
    negotiator = Negotiator([0, 1], 3)
    names = [f"n{number}" for number in range(10)]
    for name in names:
        (ready,) = announce_all(negotiator, 2, make(name))
        assert 0 <= ready.decision.identifier < 3
    assert negotiator.remembered == 3
    (ready,) = announce_all(negotiator, 2, make("n9"))
    assert not ready.fresh
    (ready,) = announce_all(negotiator, 2, make("n0"))
    assert ready.fresh


def test_a_name_that_is_waited_for_is_never_pushed_out() -> None:
    negotiator = Negotiator([0, 1], 1)
    negotiator.announce(0, [make("waiting")], 0.0)
    (other,) = announce_all(negotiator, 2, make("other"))
    assert other.decision.identifier == -1
    negotiator.announce(1, [make("waiting")], 0.0)
    (ready,) = negotiator.take()
    assert (ready.decision.name, ready.decision.identifier) == ("waiting", 0)


def test_announcing_twice_is_a_breach_that_names_the_rank() -> None:
    negotiator = Negotiator([4, 6], 8)
    negotiator.announce(1, [make("a")], 0.0)
    with pytest.raises(NegotiationError, match="rank 6 announced 'a' twice"):
        negotiator.announce(1, [make("a")], 0.0)
    negotiator.announce(0, [make("a")], 0.0)
    assert len(negotiator.take()) == 1


def test_a_set_of_one_decides_at_once() -> None:
    negotiator = Negotiator([7], 8)
    negotiator.announce(0, [make("a")], 0.0)
    negotiator.announce(0, [JOIN], 0.0)
    assert [ready.decision.name for ready in negotiator.take()] == ["a", "join.noname"]


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.ALLGATHER, Operation.REDUCESCATTER])
def test_requests_that_may_be_batched_have_equal_keys(operation: Operation) -> None:
    def key(**fields: Any) -> object:
        (ready,) = announce_all(Negotiator([0, 1], 8), 2, make("x", operation, **fields))
        return ready.key

    assert key() is not None
    assert key() == key(shape=(9, 9), caller="elsewhere.py:1")
    different = [
        {"data_type": DataType.FLOAT64},
        {"reduce_op": ReduceOp.MIN},
        {"prescale": 0.5},
        {"postscale": 0.5},
        {"device": "cuda:0"},
        {"compression": "int8"},
        {"compression": "int4"},
    ]
    assert len({key(), *(key(**fields) for fields in different)}) == len(different) + 1


@pytest.mark.parametrize("operation", [Operation.BROADCAST, Operation.ALLTOALL, Operation.BARRIER])
def test_requests_that_are_never_batched_have_no_key(operation: Operation) -> None:
    splits = (2, 2) if operation is Operation.ALLTOALL else ()
    (ready,) = announce_all(Negotiator([0, 1], 8), 2, make("x", operation, splits=splits))
    assert ready.key is None


def test_splits_that_are_not_one_for_each_rank_break_the_protocol() -> None:
    with pytest.raises(NegotiationError, match="rank 7 announced 'x' with 3 splits for 2 ranks"):
        announce_all(Negotiator([7, 8], 8), 2, make("x", Operation.ALLTOALL, splits=(1, 2, 1)))


# Who waits for whom


def test_incomplete_names_list_announced_and_missing_ranks_oldest_first() -> None:
    negotiator = Negotiator([10, 20, 30], 8)
    assert negotiator.waiting() == []
    assert negotiator.oldest() is None
    negotiator.announce(1, [make("young")], 9.0)
    negotiator.announce(0, [make("old")], 5.0)
    negotiator.announce(2, [make("old")], 6.0)
    old, young = negotiator.waiting()
    assert (old.request.name, old.since, old.announced, old.missing) == ("old", 5.0, [10, 30], [20])
    assert (young.request.name, young.since, young.announced, young.missing) == ("young", 9.0, [20], [10, 30])
    assert negotiator.oldest() == 5.0
    negotiator.announce(1, [make("old")], 99.0)
    assert negotiator.oldest() == 9.0


def test_the_age_of_a_name_starts_anew_each_round() -> None:
    negotiator = Negotiator([0, 1], 8)
    announce_all(negotiator, 2, make("a"))
    negotiator.announce(0, [make("a")], 50.0)
    assert negotiator.oldest() == 50.0


def test_joined_members_are_not_missing() -> None:
    negotiator = Negotiator([0, 1, 2], 8)
    negotiator.announce(1, [JOIN], 0.0)
    negotiator.announce(0, [make("a")], 1.0)
    (waiting,) = negotiator.waiting()
    assert waiting.missing == [2]


# Join


def test_a_joined_rank_waits_for_idle_ranks() -> None:
    negotiator = Negotiator([4, 5, 6], 8)
    negotiator.announce(0, [JOIN], 1.0)
    negotiator.announce(1, [make("a")], 2.0)
    negotiator.announce(2, [make("a")], 3.0)
    negotiator.take()
    negotiator.announce(2, [JOIN], 4.0)
    (waiting,) = negotiator.waiting()
    assert waiting == (JOIN, 4.0, [4, 6], [5])
    assert negotiator.oldest() == 4.0
    negotiator.announce(1, [JOIN], 5.0)
    assert negotiator.waiting() == []
    assert negotiator.oldest() is None


def test_joined_members_take_part_with_nothing_until_all_have_joined() -> None:
    negotiator = Negotiator([0, 5, 9], 8)
    request = make("a")
    announce_all(negotiator, 3, request)
    negotiator.announce(1, [JOIN], 0.0)
    assert not is_idle(negotiator)
    for _ in range(2):
        negotiator.announce(0, [request], 0.0)
        assert negotiator.take() == []
        negotiator.announce(2, [request], 0.0)
        (ready,) = negotiator.take()
        assert ready.decision == Decision(-1, "a", Operation.ALLREDUCE, template=request)
        assert ready.fresh
    negotiator.announce(2, [JOIN], 0.0)
    assert negotiator.take() == []
    negotiator.announce(0, [JOIN], 0.0)
    (ready,) = negotiator.take()
    assert (ready.decision.operation, ready.decision.last_joined, ready.key) == (Operation.JOIN, 0, None)
    assert is_idle(negotiator)
    (ready,) = announce_all(negotiator, 3, request)
    assert (ready.decision.template, ready.fresh) == (None, True)
    (ready,) = announce_all(negotiator, 3, request)
    assert not ready.fresh


def test_a_member_that_joins_completes_what_waited_for_it() -> None:
    negotiator = Negotiator([0, 1], 8)
    for name in "ab":
        negotiator.announce(0, [make(name)], 0.0)
    negotiator.announce(1, [JOIN], 0.0)
    assert [ready.decision.name for ready in negotiator.take()] == ["a", "b"]


def test_a_member_may_announce_after_others_joined_and_before_it_joins() -> None:
    negotiator = Negotiator([0, 1, 2], 8)
    negotiator.announce(0, [make("a")], 0.0)
    negotiator.announce(0, [JOIN], 0.0)  # its announcement still counts
    negotiator.announce(1, [JOIN], 0.0)
    negotiator.announce(2, [make("a")], 0.0)
    (ready,) = negotiator.take()
    assert ready.decision.template == make("a")


def test_joined_members_have_no_rows() -> None:
    negotiator = Negotiator([4, 5, 6], 8)
    negotiator.announce(1, [JOIN], 0.0)
    for member, rows in ((0, 3), (2, 4)):
        negotiator.announce(member, [make("gathered", Operation.ALLGATHER, (rows,))], 0.0)
        splits = (1, 0, rows - 1)
        negotiator.announce(member, [make("exchanged", Operation.ALLTOALL, (rows,), splits=splits)], 0.0)
    gathered, exchanged = negotiator.take()
    assert gathered.decision.rows == ((3, 0, 4),)
    assert [exchanged.received_by(member) for member in range(3)] == [(1, 0, 1), (0, 0, 0), (2, 0, 3)]
    assert gathered.decision.template is not None and exchanged.decision.template is not None


def test_requests_with_and_without_joined_ranks_are_never_batched_together() -> None:
    negotiator = Negotiator([0, 1], 8)
    announce_all(negotiator, 1, make("a"))
    negotiator.announce(1, [make("a")], 0.0)
    negotiator.announce(1, [JOIN], 0.0)
    negotiator.announce(0, [make("b")], 0.0)
    one, two = negotiator.take()
    assert one.key != two.key


def test_operations_that_need_joined_ranks_fail() -> None:
    negotiator = Negotiator([0, 1], 8)
    negotiator.announce(1, [JOIN], 0.0)
    negotiator.announce(0, [make("a", Operation.REDUCESCATTER)], 0.0)
    (ready,) = negotiator.take()
    assert "is not supported with Join" in ready.decision.error
    assert "rank 1 joined already" in ready.decision.error


def test_a_barrier_needs_only_those_who_are_left() -> None:
    negotiator = Negotiator([0, 1], 8)
    negotiator.announce(1, [JOIN], 0.0)
    barrier = Request(Operation.BARRIER, "barrier.noname", transient=True)
    negotiator.announce(0, [barrier], 0.0)
    (ready,) = negotiator.take()
    assert (ready.decision.operation, ready.decision.error) == (Operation.BARRIER, "")


def test_joining_twice_is_a_breach() -> None:
    negotiator = Negotiator([3, 4], 8)
    negotiator.announce(1, [JOIN], 0.0)
    with pytest.raises(NegotiationError, match="rank 4 joined twice"):
        negotiator.announce(1, [JOIN], 0.0)


@given(st.permutations(range(5)))
def test_the_last_joined_rank_is_a_global_rank(order: Sequence[int]) -> None:
    ranks = [2, 3, 5, 7, 11]
    negotiator = Negotiator(ranks, 8)
    for member in order:
        negotiator.announce(member, [JOIN], 0.0)
    (ready,) = negotiator.take()
    assert ready.decision.last_joined == ranks[order[-1]]


# A whole job, simulated


class Member:
    """One member's side, as its worker thread does it."""

    def __init__(self, capacity: int) -> None:
        self._encoder = RequestEncoder(capacity)
        self._decisions: dict[int, Decision] = {}
        self.in_flight: dict[str, Request] = {}
        self.done: list[Decision] = []

    def submit(self, request: Request) -> bytes:
        assert request.name not in self.in_flight
        self.in_flight[request.name] = request
        return encode(Announce([self._encoder.item(request)]))

    def obey(self, body: bytes) -> None:
        order = decode_from_coordinator(body)
        assert isinstance(order, Order)
        for batch in order.batches:
            decisions = [self._decision(item) for item in batch]
            if len(decisions) > 1:
                assert len({decision.operation for decision in decisions}) == 1
            for decision in decisions:
                request = self.in_flight.pop(decision.name)  # KeyError: told to run what it never submitted
                if not decision.error:
                    assert decision.operation == request.operation
                    if request.operation == Operation.ALLGATHER:
                        assert len(decision.rows[0]) > 0
                self.done.append(decision)

    def _decision(self, item: int | Decision) -> Decision:
        if isinstance(item, int):
            return self._decisions[item]
        if item.identifier >= 0:
            self._decisions[item.identifier] = item
        return item


class Job:
    """A coordinator and its members; bytes between them."""

    def __init__(self, size: int, capacity: int, threshold: int, groups_apart: bool = False) -> None:
        self.members = [Member(capacity) for _ in range(size)]
        self._decoders = [RequestDecoder(capacity) for _ in range(size)]
        self.negotiator = Negotiator(range(size), capacity)
        self._threshold = threshold
        self._groups_apart = groups_apart

    def submit(self, member: int, request: Request) -> None:
        message = decode_from_member(self.members[member].submit(request))
        assert isinstance(message, Announce)
        for item in message.items:
            self.negotiator.announce(member, self._decoders[member].requests([item]), 0.0)

    def order(self) -> None:
        self.send(self.negotiator.take())

    def send(self, ready: list[ReadyRequest]) -> None:
        if not ready:
            return
        batches = fuse(ready, self._threshold, self._groups_apart)
        body = encode(
            Order([[item.decision if item.fresh else item.decision.identifier for item in batch] for batch in batches])
        )
        for member in self.members:
            member.obey(body)


def step_requests(source: random.Random, names: Sequence[str], version: int) -> dict[str, Request]:
    """One step's requests, by name; now and then with another shape than in the step before."""
    made = {}
    for number, name in enumerate(names):
        operation = (Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER, Operation.BROADCAST)[number % 4]
        data_type = (DataType.FLOAT32, DataType.FLOAT16)[number // 2 % 2]
        rows = 1 + (version if source.random() < 0.2 else 0)
        made[name] = make(
            name, operation, (rows, 1 + number), data_type, root=0 * (number % 4 == 3) - (number % 4 != 3)
        )
    return made


@settings(max_examples=draws(200), deadline=None)
@given(
    size=st.integers(1, 5),
    capacity=st.sampled_from([0, 1, 2, 3, 5, 8, 100]),
    threshold=st.sampled_from([0, 20, 60, 1 << 20]),
    width=st.integers(1, 12),
    steps=st.integers(1, 6),
    groups_apart=st.booleans(),
    haste=st.sampled_from([0.5, 0.9, 0.98]),
    source=st.randoms(use_true_random=False),
)
def test_any_order_of_announcements_decides_every_name_once_a_step(
    size: int,
    capacity: int,
    threshold: int,
    width: int,
    steps: int,
    groups_apart: bool,
    haste: float,
    source: random.Random,
) -> None:
    job = Job(size, capacity, threshold, groups_apart)
    names = [f"n{number}" for number in range(width)]
    scripts: list[list[Request]] = [[] for _ in range(size)]
    expected: list[tuple[str, bool]] = []
    for step in range(steps):
        agreed = step_requests(source, names, step)
        odd = source.choice(names) if source.random() < 0.2 and size > 1 else None  # one rank disagrees on it
        expected += [(name, name == odd) for name in names]
        for rank in range(size):
            mine = dict(agreed)
            if odd is not None and rank == size - 1:
                mine[odd] = make(odd, mine[odd].operation, (1, 99))
            order = list(mine.values())
            source.shuffle(order)
            scripts[rank] += order
    while any(scripts) or any(member.in_flight for member in job.members):
        able = [
            rank for rank in range(size) if scripts[rank] and scripts[rank][0].name not in job.members[rank].in_flight
        ]
        if able and source.random() < haste:
            rank = source.choice(able)
            job.submit(rank, scripts[rank].pop(0))
        else:
            before = sum(len(member.done) for member in job.members)
            job.order()
            if not able:
                assert sum(len(member.done) for member in job.members) > before, "everybody waits for everybody"
    assert is_idle(job.negotiator)
    first = job.members[0].done
    assert all(member.done == first for member in job.members)
    assert sorted((decision.name, bool(decision.error)) for decision in first) == sorted(expected)
    assert job.negotiator.remembered <= capacity


def test_a_number_is_not_used_again_while_a_decision_under_it_is_on_its_way() -> None:
    """What is decided later may travel in an earlier batch."""
    gathered, reduced = make("gathered", Operation.ALLGATHER), make("reduced")
    later = make("later", Operation.ALLGATHER)
    job = Job(1, 2, 1 << 20)
    for request in (reduced, gathered):
        job.submit(0, request)
        job.order()
    for request in (gathered, reduced, later):
        job.submit(0, request)
    job.order()
    for request in (later, reduced, gathered):
        job.submit(0, request)
        job.order()
    assert not job.members[0].in_flight
    assert len(job.members[0].done) == 8


def test_thousands_of_ranks() -> None:
    size, names = 3000, [f"layer.{number}" for number in range(12)]
    negotiator = Negotiator(range(size), 100)
    requests = {name: make(name) for name in names}
    source = random.Random(7)
    for step in range(3):
        announcements = [(rank, name) for rank in range(size) for name in names]
        source.shuffle(announcements)
        decided = []
        for rank, name in announcements:
            negotiator.announce(rank, [requests[name]], 0.0)
            decided += negotiator.take()
        assert sorted(ready.decision.name for ready in decided) == sorted(names)
        assert {ready.fresh for ready in decided} == {step == 0}
    assert is_idle(negotiator)


def test_thousands_of_ranks_one_of_which_disagrees() -> None:
    size = 4000
    negotiator = Negotiator(range(size), 100)
    for rank in range(size):
        negotiator.announce(rank, [make("a", shape=(4 + (rank == 2345),))], 0.0)
    (ready,) = negotiator.take()
    assert "ranks 0-2344, 2346-3999:" in ready.decision.error
    assert "rank 2345:" in ready.decision.error
    assert len(ready.decision.error) < 1000


@settings(max_examples=draws(100), deadline=None)
@given(st.integers(2, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_uneven_work_ends_in_a_join(size: int, most: int, source: random.Random) -> None:
    """Each rank runs a number of steps of its own, then joins; all end, and the last to join is known."""
    job = Job(size, 8, 1 << 20)
    steps = [source.randint(0, most) for _ in range(size)]
    position = [0] * size
    joined: list[int] = []
    while len(joined) < size:
        rank = source.choice([rank for rank in range(size) if rank not in joined])
        member = job.members[rank]
        if member.in_flight:
            _order_with_joined(job, joined)
            continue
        if position[rank] < steps[rank]:
            position[rank] += 1
            job.submit(rank, make("grad"))
        else:
            joined.append(rank)
            job.submit(rank, JOIN)
            joined_last = rank
    _order_with_joined(job, joined)
    for member in job.members:
        assert not member.in_flight
        assert member.done[-1].operation == Operation.JOIN
        assert member.done[-1].last_joined == joined_last
        assert sum(decision.name == "grad" for decision in member.done) == max(steps)


def _order_with_joined(job: Job, joined: Sequence[int]) -> None:
    """Joined members take part in what they did not submit."""
    ready = job.negotiator.take()
    for item in ready:
        for rank in joined:
            if item.decision.operation != Operation.JOIN and item.decision.name not in job.members[rank].in_flight:
                assert item.decision.template is not None, "a joined rank could not take part"
                job.members[rank].in_flight[item.decision.name] = item.decision.template
    job.send(ready)


# Requests on device memory that only some of the ranks take part in


def some(name: str, members: tuple[int, ...], **keywords: Any) -> Request:
    spec = TensorSpec(name, DataType.FLOAT32, (4,))
    return Request(Operation.ALLREDUCE, name, (spec,), device="gpu:nccl", members=members, **keywords)


def test_a_request_of_some_ranks_is_ready_when_these_have_announced_it() -> None:
    negotiator = Negotiator([0, 1, 2], 8)
    request = some("x", (0, 2))
    negotiator.announce(2, [request], 0.0)
    (waiting,) = negotiator.waiting()
    assert (waiting.announced, waiting.missing) == ([2], [0])
    negotiator.announce(0, [request], 0.0)
    (ready,) = negotiator.take()
    assert ready.decision.members == (0, 2) and ready.decision.device == "gpu:nccl" and not ready.decision.error


def test_requests_of_different_members_are_never_batched_together() -> None:
    negotiator = Negotiator([0, 1], 8)
    for name, members in (("x", (0, 1)), ("y", (0,)), ("z", ())):
        for member in members or (0, 1):
            negotiator.announce(member, [some(name, members)], 0.0)
    keys = [ready.key for ready in negotiator.take()]
    assert len(set(keys)) == 3


def test_a_joined_rank_is_still_waited_for_by_another_process_set() -> None:
    negotiator = Negotiator([0, 1, 2], 8)
    negotiator.announce(0, [Request(Operation.JOIN, "join", transient=True)], 0.0)
    negotiator.announce(1, [some("x", (0, 1))], 0.0)
    assert not negotiator.ready and negotiator.waiting()[0].missing == [0]


def test_a_request_for_other_members_breaks_the_protocol() -> None:
    for members, rank in (((0, 1), 2), ((0, 2), 1)):
        negotiator = Negotiator([0, 1, 2], 8)
        negotiator.announce(0, [some("x", (0, 1))], 0.0)
        with pytest.raises(NegotiationError, match="for other ranks"):
            negotiator.announce(rank, [some("x", members)], 0.0)
