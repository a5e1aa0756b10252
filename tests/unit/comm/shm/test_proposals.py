"""Proposals of collectives in shared memory, among ranks inside this one process, and their results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from engines import proposals_of, propose
from horovod.comm.reduction import ReduceOp
from horovod.comm.shm import futex_words
from horovod.comm.shm.proposals import Proposals, fits
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until

Group = list[Proposals]


@pytest.fixture
def make() -> Iterator[Callable[[int], Group]]:
    with ExitStack() as stack:

        def made(size: int) -> Group:
            group = proposals_of(size)
            for proposals in group:
                stack.callback(proposals.close)
            return group

        yield made


@pytest.fixture(params=[2, 3, 8])
def group(make: Callable[[int], Group], request: pytest.FixtureRequest) -> Group:
    return make(request.param)


@pytest.fixture
def pair(make: Callable[[int], Group]) -> Group:
    return make(2)


def propose_all(group: Group, identity: bytes = b"x", length: int = 5, offset: float = 0.0) -> list[int]:
    return [
        propose(proposals, identity, [np.full(length, rank + offset, np.float32)])
        for rank, proposals in enumerate(group)
    ]


def decided(group: Group, identity: bytes = b"x") -> bool:
    """What a leader does that waits for nobody."""
    leader = group[0]
    number = 1 + max(number for number in range(1000) if number == 0 or leader.over(number))
    success = all(
        leader.await_proposal(peer, number, 1, 0) and leader.alike(peer, identity) for peer in range(1, len(group))
    )
    leader.decide(success)
    return success


def sums(group: Group, length: int = 5) -> list[list[float]]:
    found = []
    for proposals in group:
        target = np.zeros(length, np.float32)
        proposals.reduce([target], ReduceOp.SUM, 1.0, 1.0)
        found.append(target.tolist())
    return found


def test_try_after_try_succeeds(group: Group) -> None:
    for turn in range(7):
        numbers = propose_all(group, offset=turn)
        assert numbers == [turn + 1] * len(group)
        assert not any(proposals.over(turn + 1) for proposals in group)
        assert decided(group)
        assert all(proposals.over(turn + 1) and proposals.succeeded() for proposals in group)
        assert sums(group) == [[float(sum(rank + turn for rank in range(len(group))))] * 5] * len(group)


def test_only_what_is_alike_to_the_last_byte_succeeds(group: Group) -> None:
    for turn, last in enumerate([b"y", b"xx", b"", b"\0"]):
        propose_all(group[:-1])
        propose(group[-1], last, [])
        assert decided(group) == (
            last == b"xx"
        )  # it begins with x: a description that is whole is no other's beginning
        if last != b"xx":
            assert all(proposals.over(turn + 1) and not proposals.succeeded() for proposals in group)


def test_a_peer_without_a_proposal_is_not_part_of_it(group: Group) -> None:
    propose_all(group)
    assert decided(group)
    propose_all(group[:-1])
    assert not decided(group)  # the last one's proposal was for the try before
    assert not any(proposals.succeeded() for proposals in group[:-1])
    propose_all(group, offset=1)
    assert decided(group)
    assert sums(group)[0][0] == sum(rank + 1 for rank in range(len(group)))


def test_failed_proposals_do_not_overwrite_memory_that_others_read(pair: Group) -> None:
    leader, slow = pair
    propose_all(pair)
    assert decided(pair)
    for _ in range(5):  # tries of the leader, while the other has yet to read
        propose(leader, b"x", [np.full(5, 77, np.float32)])
        leader.decide(False)
    assert slow.succeeded()
    assert sums([slow]) == [[1.0] * 5]


def persist(wait: Callable[[], bool]) -> None:
    """A sleep may end early; what it was for has come when ``wait()`` says so."""
    wait_until(wait, "what is waited for", seconds=20)


def test_a_late_leader_or_a_late_member_still_succeeds(pair: Group) -> None:
    leader, member = pair

    propose(leader, b"x", [])
    waiting = ConcurrentCalls(lambda: persist(lambda: leader.await_proposal(1, 1, 1, 10)))
    time.sleep(0.05)  # so that it sleeps by then; the test holds if it does not
    propose(member, b"x", [])
    waiting.results()
    waiting = ConcurrentCalls(lambda: persist(lambda: member.await_outcome(1, 1, 10)))
    time.sleep(0.05)  # as above
    leader.decide(True)
    waiting.results()


def test_waiting_ends(pair: Group) -> None:
    leader, member = pair
    assert not leader.await_proposal(1, 1, 10, 0)
    assert not leader.await_proposal(1, 1, 1, 0.01)
    number = propose(member, b"x", [])
    assert not member.await_outcome(number, 10, 0)
    assert not member.await_outcome(number, 1, 0.01)
    assert leader.await_proposal(1, number, 0, 1e6)  # it is there, so there is no wait
    leader.decide(False)
    assert member.await_outcome(number, 0, 1e6)


def test_a_leader_that_closes_the_fast_path_ends_the_proposal(pair: Group) -> None:
    leader, member = pair
    leader.shut()
    leader.shut()
    assert member.closed()
    assert not member.over(1)  # nothing was proposed
    leader.reopen()
    assert not member.closed()
    number = propose(member, b"x", [])
    leader.shut()
    assert member.closed() and member.over(number) and not member.succeeded()
    late = propose(member, b"x", [])
    leader.shut()
    assert member.closed() and not member.over(late)


def test_a_try_that_a_peer_gives_up_is_over_unless_it_succeeded(pair: Group) -> None:
    leader, member = pair
    number = propose(member, b"x", [])
    assert not leader.give_up(1, number)
    assert member.over(number) and not member.succeeded()
    assert not leader.give_up(1, number)
    for wrong in (0, -1, number + 2):
        with pytest.raises(ValueError, match=f"try {wrong} of"):
            leader.give_up(1, wrong)


def test_only_ranks_that_stopped_waiting_before_a_success_get_a_message(group: Group) -> None:
    """And what it says of that afterwards, however late, is known to have succeeded."""
    leader, last = group[0], len(group) - 1
    for turn in range(4):
        (number, *_) = propose_all(group, offset=turn)
        impatient = turn != 2
        if impatient:
            assert not group[last].stop_waiting(number)
        assert leader.decide(True) == [last] * impatient
        assert group[last].stop_waiting(number) and group[last].succeeded()
    assert leader.give_up(last, 1) and not leader.give_up(last, 1)
    assert not leader.give_up(last, 3)
    assert leader.give_up(last, 4)


def test_a_failed_proposal_needs_no_message(pair: Group) -> None:
    leader, member = pair
    number = propose(member, b"x", [])
    assert not member.stop_waiting(number)
    assert leader.decide(False) == []
    assert not leader.give_up(1, number)


@pytest.mark.parametrize("lengths", [[0], [1], [3, 0, 4], [2048], []])
def test_several_tensors_of_any_length(group: Group, lengths: Sequence[int]) -> None:
    inputs = [[np.arange(length, dtype=np.float64) * rank for length in lengths] for rank in range(len(group))]
    for proposals, some in zip(group, inputs, strict=True):
        propose(proposals, b"x", some)
    assert decided(group)
    for proposals in group:
        outputs = [np.full(length, -1.0) for length in lengths]
        proposals.reduce(outputs, ReduceOp.SUM, 1.0, 1.0)
        for output in outputs:
            np.testing.assert_array_equal(output, np.arange(len(output)) * sum(range(len(group))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_every_type_and_operation(group: Group, dtype: type, op: ReduceOp) -> None:
    values = [np.array([rank % 2, 1, rank % 3], np.int64).astype(dtype) for rank in range(len(group))]
    for proposals, value in zip(group, values, strict=True):
        propose(proposals, b"x", [value])
    assert decided(group)
    fold = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]
    expected = fold.reduce(np.stack(values), dtype=dtype)
    for proposals in group:
        target = np.zeros(3, dtype)
        proposals.reduce([target], op, 1.0, 1.0)
        np.testing.assert_array_equal(target, expected)


def test_factors_and_an_output_that_is_the_input(pair: Group) -> None:
    arrays = [np.full(3, rank + 1, np.float32) for rank in range(2)]
    for proposals, array in zip(pair, arrays, strict=True):
        propose(proposals, b"x", [array])
    assert decided(pair)
    for proposals, array in zip(pair, arrays, strict=True):
        proposals.reduce([array], ReduceOp.SUM, 2.0, 0.25)
        assert array.tolist() == [1.5] * 3


def test_parts_of_several_types(group: Group) -> None:
    """Also where a part ends between two elements of the next one's type."""
    size = len(group)
    for rank, proposals in enumerate(group):
        proposals.contribute([np.full(3, rank, np.uint8)], 0)
        proposals.contribute([np.full(5, rank, np.int64), np.full(2, 2 * rank, np.int64)], 16)
        proposals.contribute([np.full(3, rank, np.complex128)], 80)
        proposals.propose(b"x")
    assert decided(group)
    total = sum(range(size))
    for rank, proposals in enumerate(group):
        few, one, two, last = np.zeros(3, np.uint8), np.zeros(5, np.int64), np.zeros(2, np.int64), np.zeros(3, complex)
        proposals.reduce([few], ReduceOp.SUM, 1.0, 1.0, 0)
        proposals.reduce([one, two], ReduceOp.SUM, 1.0, 1.0, 16)
        proposals.broadcast([last], 1, 80)
        assert few.tolist() == [total] * 3
        assert one.tolist() == [total] * 5 and two.tolist() == [2 * total] * 2
        assert last.tolist() == [0 if rank == 1 else 1] * 3


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(group: Group, root: int) -> None:
    source = [np.arange(3.0), np.full(2, 7.0)]
    targets = [[np.zeros(3), np.zeros(2)] for _ in group]
    for rank, proposals in enumerate(group):
        propose(proposals, b"x", source if rank == root else [])
    assert decided(group)
    for rank, proposals in enumerate(group):
        proposals.broadcast(source if rank == root else targets[rank], root)
        if rank != root:
            assert [target.tolist() for target in targets[rank]] == [array.tolist() for array in source]


def test_allgather_of_parts_of_any_length(group: Group) -> None:
    counts = [3 * (rank % 3) for rank in range(len(group))]
    for rank, proposals in enumerate(group):
        propose(proposals, b"x", [np.full(counts[rank], rank, np.int32)], [counts[rank] // 3])
    assert decided(group)
    for proposals in group:
        assert proposals.notes(1) == tuple((count // 3,) for count in counts)
        output = np.full(sum(counts), -1, np.int32)
        proposals.allgather(output, counts)
        assert output.tolist() == [rank for rank, count in enumerate(counts) for _ in range(count)]


def test_alltoall_sends_each_rank_its_part(group: Group) -> None:
    size = len(group)
    counts = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    for sender, proposals in enumerate(group):
        sent = [100 * sender + receiver for receiver, count in enumerate(counts[sender]) for _ in range(count)]
        propose(proposals, b"x", [np.array(sent, np.int32)], counts[sender])
    assert decided(group)
    for receiver, proposals in enumerate(group):
        assert proposals.notes(size) == tuple(map(tuple, counts))
        column = [row[receiver] for row in counts]
        for sizes in ([sum(column)], column):
            outputs = [np.full(each, -1, np.int32) for each in sizes]
            proposals.alltoall(outputs, column, counts)
            expected = [100 * sender + receiver for sender, count in enumerate(column) for _ in range(count)]
            assert np.concatenate(outputs).tolist() == expected


def test_identities_notes_and_data_as_long_as_they_may_be(group: Group) -> None:
    size = len(group)
    identity = bytes(number % 251 for number in range(1024 - 8 * size))
    assert fits(identity, range(size)) and not fits(identity + b"x", range(size))
    arrays = [np.full(group[0].data_bytes, rank, np.uint8) for rank in range(size)]
    for proposals, array in zip(group, arrays, strict=True):
        propose(proposals, identity, [array], [2**63 - rank for rank in range(size)])
    assert decided(group, identity)
    for proposals in group:
        assert proposals.notes(size) == (tuple(2**63 - rank for rank in range(size)),) * size
        target = np.zeros(group[0].data_bytes, np.uint8)
        proposals.reduce([target], ReduceOp.MAX, 1.0, 1.0)
        assert set(target) == {len(group) - 1}


@pytest.mark.parametrize("fenced", [False, True], ids=["this processor", "one that reorders"])
def test_ranks_that_run_at_the_same_time(group: Group, fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tries fail; whoever succeeded has the right sum."""
    monkeypatch.setattr(futex_words, "weakly_ordered", fenced)
    turns = 300

    def leader() -> int:
        wins = 0
        for turn in range(turns):
            number = propose(group[0], b"%d" % turn, [np.full(9, turn, np.int64)])
            for peer in range(1, len(group)):
                persist(lambda peer=peer, number=number: group[0].await_proposal(peer, number, 20, 20))
            success = turn % 3 != 1 and all(group[0].alike(peer, b"%d" % turn) for peer in range(1, len(group)))
            group[0].decide(success)
            wins += success
            if success:
                check(0, turn)
        return wins

    def member(rank: int) -> int:
        wins = 0
        for turn in range(turns):
            number = propose(group[rank], b"%d" % turn, [np.full(9, turn + rank, np.int64)])
            persist(lambda number=number: group[rank].await_outcome(number, 20, 20))
            if group[rank].succeeded():
                wins += 1
                check(rank, turn)
        return wins

    def check(rank: int, turn: int) -> None:
        target = np.zeros(9, np.int64)
        group[rank].reduce([target], ReduceOp.SUM, 1.0, 1.0)
        assert set(target) == {turn * len(group) + sum(range(len(group)))}

    found = run_concurrently(leader, *[lambda rank=rank: member(rank) for rank in range(1, len(group))], seconds=60)
    assert found == [turns * 2 // 3] * len(group)


def test_the_rank_that_proposes_last_need_not_wait_for_the_leader(group: Group) -> None:
    last = len(group) - 1
    for turn in range(4):
        for rank, proposals in enumerate(group):
            number = propose(proposals, b"x", [np.full(5, rank, np.float32)])
            if rank:
                assert proposals.conclude(number, b"x") == (rank == last)
        target = np.zeros(5, np.float32)
        group[last].reduce([target], ReduceOp.SUM, 1.0, 1.0)
        assert set(target) == {sum(range(len(group)))}
        if turn % 2:  # it may propose again before the leader has seen anything
            assert propose(group[last], b"y", [np.zeros(5, np.float32)]) == number + 1
            assert not group[last].conclude(number + 1, b"y")
        assert decided(group)
        assert all(sum(row) == 5 * sum(range(len(group))) for row in sums(group[:last]))
        if turn % 2:
            assert not group[0].withdraw(propose(group[0], b"x", ()), b"x")
            group[0].decide(False)


def test_what_a_rank_has_concluded_holds_even_if_the_leader_withdraws(group: Group) -> None:
    numbers = propose_all(group)
    assert group[-1].conclude(numbers[-1], b"x")
    assert group[0].withdraw(numbers[0], b"x")
    group[0].decide(True)
    assert [proposals.succeeded() for proposals in group] == [True] * len(group)
    numbers = [propose(proposals, b"x", ()) for proposals in group[:-1]]
    assert not group[0].withdraw(numbers[0], b"x")
    late = propose(group[-1], b"x", ())
    assert not group[-1].conclude(late, b"x")


@pytest.mark.parametrize("fenced", [False, True], ids=["this processor", "one that reorders"])
def test_all_ranks_have_one_outcome_however_leader_and_peers_race(
    group: Group, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader gives up after a few polls, so it often withdraws while the last rank concludes."""
    monkeypatch.setattr(futex_words, "weakly_ordered", fenced)
    turns = 400
    seed = random.Random(len(group))
    waits = [[seed.choice([0, 0, 5e-5, 3e-4]) for _ in range(turns)] for _ in group]

    def leader() -> list[bool]:
        found = []
        for turn in range(turns):
            time.sleep(waits[0][turn])
            number, identity = propose(group[0], b"%d" % turn, [np.full(9, turn, np.int64)]), b"%d" % turn
            success = all(
                group[0].await_proposal(peer, number, 50, 0) and group[0].alike(peer, identity)
                for peer in range(1, len(group))
            ) or group[0].withdraw(number, identity)
            for peer in range(1, len(group)):  # so that all take part in every try, if too late
                persist(lambda peer=peer, number=number: group[0].await_proposal(peer, number, 20, 20))
            group[0].decide(success)
            found.append(success)
            if success:
                check(0, turn)
        return found

    def member(rank: int) -> list[bool]:
        found = []
        for turn in range(turns):
            time.sleep(waits[rank][turn])
            identity = b"%d" % turn
            number = propose(group[rank], identity, [np.full(9, turn + rank, np.int64)])
            if group[rank].conclude(number, identity):
                success = True
            else:
                persist(lambda number=number: group[rank].await_outcome(number, 20, 20))
                success = group[rank].succeeded()
            found.append(success)
            if success:
                check(rank, turn)
        return found

    def check(rank: int, turn: int) -> None:
        target = np.zeros(9, np.int64)
        group[rank].reduce([target], ReduceOp.SUM, 1.0, 1.0)
        assert set(target) == {turn * len(group) + sum(range(len(group)))}

    found = run_concurrently(leader, *[lambda rank=rank: member(rank) for rank in range(1, len(group))], seconds=60)
    assert all(outcomes == found[0] for outcomes in found[1:])


class Steps:
    """The words of one rank, each access to which is a step: it waits until the schedule comes to it."""

    def __init__(self, values: memoryview, step: Callable[[], None]) -> None:
        self._values, self._step = values, step

    def __getitem__(self, index: int) -> int:
        self._step()
        return int(self._values[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self._values[index] = value


def in_steps(group: Group, calls: Sequence[Callable[[], bool]], seed: int) -> list[bool]:
    """The results of one call for each rank, whose accesses to the words take turns at random."""
    schedule, found = random.Random(seed), [False] * len(calls)
    go, stopped = [threading.Semaphore(0) for _ in calls], threading.Semaphore(0)
    running = set(range(len(calls)))

    def step(rank: int) -> None:
        stopped.release()
        go[rank].acquire()

    def run(rank: int) -> None:
        go[rank].acquire()
        found[rank] = calls[rank]()
        running.discard(rank)
        stopped.release()

    plain = [proposals._words.values for proposals in group]
    for rank, proposals in enumerate(group):
        proposals._words.values = Steps(plain[rank], partial(step, rank))  # type: ignore[assignment]  # as code uses it
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    # A few steps of one rank at a time, so that one may be far ahead of another.
    while running:
        rank = schedule.choice(sorted(running))
        for _ in range(schedule.choice([1, 1, 2, 5, 20])):
            if rank in running:
                go[rank].release()
                stopped.acquire()
    for thread in threads:
        thread.join()
    for proposals, values in zip(group, plain, strict=True):
        proposals._words.values = values
    return found


def test_in_any_order_of_reads_and_writes_no_rank_concludes_what_the_leader_lets_fail() -> None:
    together = 0
    for seed in range(400):
        group = proposals_of(3)

        def leader(group: Group = group) -> bool:
            number = propose(group[0], b"x", ())
            success = all(
                group[0].await_proposal(peer, number, 2, 0) and group[0].alike(peer, b"x") for peer in (1, 2)
            ) or group[0].withdraw(number, b"x")
            group[0].decide(success)
            propose(group[0], b"y", ())
            return success

        def member(rank: int, group: Group = group) -> bool:
            return group[rank].conclude(propose(group[rank], b"x", ()), b"x")

        success, *concluded = in_steps(group, [leader, partial(member, 1), partial(member, 2)], seed)
        for proposals in group:
            proposals.close()
        assert success or not any(concluded), f"schedule {seed}"
        together += success and any(concluded)
    assert together > 20
