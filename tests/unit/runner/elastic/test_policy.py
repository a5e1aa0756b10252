"""What an elastic job does about hosts and processes that come and go: decided without any process."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable

import pytest

from elastic_policy_world import KILLED, PolicyWorld
from horovod.control.elastic_messages import Connected, HostUpdateResult, Leaving, RankFailed, ReadyForRound, Returned
from horovod.runner.agent.messages import Exit
from horovod.runner.policy import EndAll


def test_the_first_round_begins_when_all_have_come() -> None:
    world = PolicyWorld({"a": 2, "b": 1})
    world.ready(0, 2)
    assert not world.assignments
    world.ready(1)
    assert world.ranks() == [0, 1, 2]
    assert [world.assignments[n].hostname for n in world.ranks()] == ["a", "a", "b"]
    assert {slot.size for slot in world.assignments.values()} == {3}


def test_the_first_round_does_not_wait_for_ever_for_ranks_that_are_not_needed() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.ready(0, 1)
    assert not world.assignments
    world.wake("starting")
    assert world.ranks() == [0, 1]
    world.connect()
    world.ready(2)
    assert world.announced == HostUpdateResult.added


@pytest.mark.parametrize("first", [0, 2])
def test_a_failure_that_would_come_again_ends_the_job_for_all(first: int) -> None:
    world = PolicyWorld({"a": 3})
    world.begin()
    others = [number for number in range(3) if number != first]
    for number in (first, *others):
        world.asked[number] += 1
        world.do(
            world.policy.on_message(
                number, ReadyForRound(world.asked[number], 1, True, "Mismatched shapes", final=number == first)
            )
        )
    assert world.dismissed == {0: True, 1: True, 2: True}
    for number in range(3):
        world.end(number, Exit(1))
    assert world.policy.round == 1 and not world.alive


def test_one_line_says_who_was_lost_and_where_the_others_were_and_the_job_keeps_it() -> None:
    world = PolicyWorld({"a": 3, "b": 1}, least=1)
    world.begin()
    world.end(3)
    world.collectives[1] = "allreduce 'loss'"  # rank 0 was about to call it
    world.ready(0, 1, 2, failed=True)
    lost = "rank 3 on b (process 3, exit code 137 (killed by SIGKILL))"
    where = "was lost while the others were in allreduce 'loss' at train.py:7; 3 ranks go on"
    assert f"horovodrun: {lost} {where}\n" in world.said
    assert world.named == [f"in round 1 {lost}"], "the ranks of the next round know it"
    world.collectives.clear()
    world.connect()
    world.do(world.policy.on_message(0, RankFailed(2, 2, "it is stopped")))
    world.ready(0, failed=True)
    world.end(1, Exit(1))
    world.wake("hung 2 2")
    both = "rank 1 on a (process 1, exit code 1), rank 2 on a (process 2, it was stuck, and was killed)"
    assert f"horovodrun: {both} were lost while the others were at train.py:7; 1 rank goes on\n" in world.said
    assert world.policy.survived[0] == f"in round 1 {lost}"
    assert len(world.policy.survived) == 3 and world.named == world.policy.survived
    world.connect()
    world.end(0)
    assert len(world.policy.survived) == 3, "the job has not gone on without the last one"


def test_survivors_go_on_with_their_processes_when_a_rank_is_lost() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.end(1)
    assert world.ended_rounds == [1]
    world.ready(0, failed=True)
    assert world.policy.round == 1, "the other survivor has not come"
    world.ready(2, failed=True)
    assert world.ranks() == [0, 2]
    assert world.policy.round == 2
    assert set(world.alive) == {0, 2}, "nothing is started on a host where a process failed"


def test_a_lost_rank_is_replaced_after_the_hosts_cooldown() -> None:
    world = PolicyWorld({"a": 3}, least=2, cooldown=(10, 100))
    world.begin()
    world.end(1)
    world.ready(0, 2, failed=True)
    world.connect()
    assert world.timers["cooldown a"] == pytest.approx(25.0)  # twice the shortest, and some
    world.wake("cooldown a")
    assert set(world.alive) == {0, 2, 3}
    world.ready(3)
    assert world.announced == HostUpdateResult.added
    world.ready(0, 2)
    assert sorted(world.ranks()) == [0, 2, 3]
    assert world.ranks()[0] == 0, "rank 0 has the state of the job"
    assert world.assignments[3].local_rank == 1, "it takes the device of the one it replaces"


def test_a_host_that_fails_at_once_each_time_waits_longer_each_time() -> None:
    world = PolicyWorld({"a": 1, "b": 1}, least=1, cooldown=(1, 60))
    pauses = []
    for _ in range(7):
        number = max(number for number, host in world.alive.items() if host == "b")
        world.end(number, Exit(1))
        pauses.append(world.timers["cooldown b"])
        world.wake("cooldown b")
    assert pauses == sorted(pauses)
    assert pauses[0] < 3 < 60 == pauses[-1]


def test_rank_0_is_never_one_that_is_new() -> None:
    world = PolicyWorld({"a": 2, "b": 2}, least=1, cooldown=(1, 2))
    world.begin()
    world.end(0)
    world.end(1)
    world.ready(2, 3, failed=True)
    world.connect()
    assert world.ranks() == [2, 3]
    world.wake("cooldown a")
    world.ready(4, 5, 2, 3)
    assert world.ranks() == [2, 3, 4, 5]


def test_a_new_host_joins_when_its_processes_are_ready_and_not_before() -> None:
    world = PolicyWorld({"a": 2})
    world.begin()
    world.hosts({"a": 2, "b": 2})
    assert set(world.alive) == {0, 1, 2, 3}
    assert not world.announced, "training goes on while they start"
    world.ready(2)
    assert not world.announced, "one interruption for both"
    world.ready(3)
    assert world.announced == HostUpdateResult.added
    world.ready(0, 1)
    assert world.ranks() == [0, 1, 2, 3]


def test_a_new_rank_does_not_wait_long_for_another_that_is_slow_to_start() -> None:
    world = PolicyWorld({"a": 2})
    world.begin()
    world.hosts({"a": 2, "b": 2})
    world.ready(2)
    world.wake("settle 1")
    assert world.announced == HostUpdateResult.added
    world.ready(0, 1)
    assert world.ranks() == [0, 1, 2]


def test_a_withdrawn_host_is_left_and_its_processes_end_well() -> None:
    world = PolicyWorld({"a": 2, "b": 2}, least=2)
    world.begin()
    world.hosts({"b": 2})
    assert world.announced == HostUpdateResult.removed
    world.ready(0, 1, 2, 3)
    assert world.ranks() == [2, 3]
    assert world.dismissed == {0: False, 1: False}
    world.end(0, Exit(0))
    world.end(1, Exit(0))
    world.connect()
    assert world.policy.undecided
    assert world.policy.first_failure is None


def test_a_withdrawn_host_is_kept_as_long_as_too_few_would_be_left() -> None:
    world = PolicyWorld({"a": 2, "b": 2}, least=3)
    world.begin()
    world.hosts({"a": 2})
    assert not world.announced
    world.hosts({"a": 2, "c": 1})
    world.ready(4)
    assert world.announced == HostUpdateResult.mixed
    world.ready(0, 1, 2, 3)
    assert world.ranks() == [0, 1, 4]


def test_when_all_hosts_are_replaced_at_once_the_state_is_handed_on() -> None:
    world = PolicyWorld({"a": 2}, least=2, most=2)
    world.begin()
    world.hosts({"b": 2})
    assert set(world.alive) == {0, 1, 2, 3}
    world.ready(2, 3)
    assert world.announced == HostUpdateResult.mixed
    world.ready(0, 1)
    assert world.ranks()[0] == 0, "it has the state"
    assert len(world.ranks()) == 2
    world.connect()
    assert world.announced, "and goes as soon as another one has it"
    world.end(1, Exit(0))
    world.ready(*world.ranks())
    assert world.ranks() == [2, 3]


def test_a_rank_that_is_told_to_end_leaves_without_an_error() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.do(world.policy.on_message(1, Leaving(1)))
    assert world.announced == HostUpdateResult.removed
    world.ready(0, 1, 2)
    assert world.ranks() == [0, 2]
    world.end(1, Exit(0))
    assert world.policy.first_failure is None
    assert not world.said.count("exit")
    assert set(world.alive) == {0, 2}, "its host is about to go"


def test_a_host_whose_agent_is_asked_to_end_is_lost_and_the_job_goes_on() -> None:
    world = PolicyWorld({"a": 2, "b": 1}, least=2)
    world.begin()
    world.do(world.policy.host_signalled(["b"], signal.SIGTERM))
    assert "the agent of b got SIGTERM: that host counts as lost. No new processes are started on b." in world.said
    world.end(2, Exit(255, reason="the agent of b has ended"))
    world.ready(0, 1, failed=True)
    assert world.ranks() == [0, 1]
    assert not world.policy.interrupted and set(world.alive) == {0, 1}


def test_a_newcomer_that_dies_while_it_connects_costs_one_more_round() -> None:
    world = PolicyWorld({"a": 2, "b": 1}, least=2)
    world.ready(0, 1)
    world.wake("starting")
    world.connect()
    world.ready(2)
    world.ready(0, 1)
    assert len(world.assignments) == 3
    world.end(2)
    assert world.ended_rounds[-1] == 2, "those who still wait for it are told"
    world.ready(0, 1, failed=True)
    assert world.ranks() == [0, 1]


def test_rounds_that_repeatedly_fail_to_begin_end_the_job() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    for _ in range(3):
        world.ready(0, 1, failed=True)
    world.ready(0, 1, failed=True)
    assert "3 rounds in a row could not begin. why" in world.policy.stopped


@pytest.mark.parametrize(("continues", "least", "stay"), [(False, 1, [1, 2, 3]), (True, 1, [0, 3]), (False, 4, None)])
def test_if_hosts_cannot_reach_each_other_the_larger_part_goes_on(
    continues: bool, least: int, stay: list[int] | None
) -> None:
    """Rank 0 is in the smaller part: a job that cannot go on without it goes on there."""
    world = PolicyWorld({"a": 1, "b": 2, "c": 1}, least=least, start=4, continues=continues)
    world.begin()
    world.ready(0, 1, 2, 3, failed=True)
    assert world.policy.round == 2 and not world.killed, "nothing is known yet of a cut"
    world.cut = ((1, 0),)  # ranks on b and on a
    world.ready(0, 1, 2, 3, failed=True)
    assert world.policy.round == 3
    assert world.ranks() == (stay or [0, 1, 2, 3]), "too few ranks are no part that can go on"
    for number in world.killed:
        assert f"process {number}, {'b' if number else 'a'} and {'a' if number else 'b'} cannot reach" in world.said


def test_a_rank_that_is_stuck_is_ended_if_it_does_not_come_by_itself() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.do(world.policy.on_message(0, RankFailed(1, 1, "does not answer")))
    world.ready(0, 2, failed=True)
    world.wake("hung 1 1")
    assert set(world.alive) == {0, 2}
    assert world.ranks() == [0, 2]


def test_a_rank_that_was_accused_and_comes_is_not_ended() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.do(world.policy.on_message(0, RankFailed(1, 1, "its connection broke")))
    world.ready(0, 1, 2, failed=True)
    world.wake("hung 1 1")
    assert world.ranks() == [0, 1, 2]


def test_too_few_ranks_and_no_hope_end_the_job_and_say_why() -> None:
    world = PolicyWorld({"a": 2}, least=2, fixed=True)
    world.begin()
    world.end(0)
    world.ready(1, failed=True)
    assert world.policy.stopped == (
        "1 rank of at least 2 is left, and no more can be started: processes have failed on a"
    )
    assert world.dismissed == {1: True}
    world.end(1, Exit(1))
    assert not world.policy.undecided
    failure = world.policy.first_failure
    assert failure is not None and failure.exit == KILLED


def test_too_few_ranks_wait_for_a_host_and_go_on_with_it() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.begin()
    world.end(0)
    world.ready(1, failed=True)
    assert "1 rank of at least 2 is left; waiting for more" in world.said
    world.hosts({"a": 2, "b": 1})
    world.ready(2)
    assert world.ranks() == [1, 2]
    world.wake("patience 1")
    assert not world.policy.stopped


def test_a_job_that_waits_too_long_for_hosts_is_told() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.begin()
    world.end(0)
    world.ready(1, failed=True)
    world.wake("patience 1")
    assert "1 rank of at least 2 is left" in world.policy.stopped


def test_a_job_whose_hosts_do_not_come_says_so() -> None:
    world = PolicyWorld({"a": 1}, least=2)
    assert not world.alive
    world.wake("slots")
    assert world.policy.stopped.startswith("Timed out waiting for minimum number of slots to become available.")
    assert not world.policy.undecided


def test_nothing_is_left_of_the_state_when_all_are_lost() -> None:
    world = PolicyWorld({"a": 1, "b": 1}, least=1)
    world.begin()
    world.end(0)
    world.end(1)
    assert world.policy.stopped == "no remaining rank has the state of the job"
    assert not world.policy.undecided


def test_the_reset_limit_ends_the_job() -> None:
    world = PolicyWorld({"a": 4}, least=1, resets=2)
    world.begin()
    for number in range(2):
        world.end(number)
        world.ready(*sorted(world.alive), failed=True)
        world.connect()
    assert not world.policy.stopped
    world.end(2)
    world.ready(3, failed=True)
    assert world.policy.stopped == (
        "Horovod was shutdown because number of resets during elastic job exceeded limit: 2"
    )


def test_no_round_is_interrupted_for_a_new_host_after_the_last_reset() -> None:
    world = PolicyWorld({"a": 2}, resets=0)
    world.begin()
    world.hosts({"a": 2, "b": 1})
    world.ready(2)
    assert not world.announced


def test_a_job_whose_ranks_all_end_well_ends_well() -> None:
    world = PolicyWorld({"a": 2})
    world.begin()
    world.end(1, Exit(0))
    assert world.policy.undecided
    world.end(0, Exit(0))
    assert not world.policy.undecided
    assert world.policy.first_failure is None
    assert not world.policy.stopped


def test_a_rank_lost_in_an_earlier_round_does_not_fail_a_job_that_ends_well() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.end(2)
    world.ready(0, 1, failed=True)
    world.connect()
    world.end(0, Exit(0))
    world.end(1, Exit(0))
    assert world.policy.first_failure is None


@pytest.mark.parametrize("asks_first", [True, False], ids=["it asks first", "the other ends first"])
def test_a_rank_that_ends_well_before_others_have_finished_fails_the_job(asks_first: bool) -> None:
    world = PolicyWorld({"a": 3}, least=1)
    world.begin()
    world.do(world.policy.on_message(0, Returned(1, 10)))
    if asks_first:
        world.ready(1, failed=True)
        assert not world.dismissed, "it may yet be a loss"
    world.end(0, Exit(0))
    if not asks_first:
        assert not world.policy.stopped
        world.ready(1, failed=True)
    assert world.dismissed == {1: True}
    world.end(1, Exit(0))  # its script has caught the error
    assert world.policy.undecided, "rank 2 may write a result"
    world.end(2, Exit(0))
    assert not world.policy.undecided
    first = "Process 0 (rank 0, on a) returned from the training function after 10 commits and ended with exit code 0"
    assert world.policy.stopped == f"{first} before 1 other rank had finished:\n  rank 1 waited at train.py:7: why"
    assert world.reasons[1] == f"{first}, so no further round begins"


def test_a_rank_that_ends_well_after_it_has_asked_for_another_round_has_not_finished() -> None:
    world = PolicyWorld({"a": 1, "b": 1})
    world.begin()
    world.ready(1, failed=True)
    world.end(1, Exit(0))
    world.end(0, Exit(0))
    assert "Process 0 (rank 0, on a) ended with exit code 0 before 1 other rank had finished" in world.policy.stopped


def test_a_rank_that_was_told_to_end_and_finishes_first_has_done_its_work() -> None:
    world = PolicyWorld({"a": 1})
    world.begin()
    world.do(world.policy.on_message(0, Leaving(1)))
    world.end(0, Exit(0))
    assert not (world.policy.undecided or world.policy.stopped or world.policy.first_failure)


def test_a_rank_that_neither_finishes_nor_asks_after_the_job_has_failed_is_not_awaited_for_ever() -> None:
    world = PolicyWorld({"a": 3}, least=1)
    world.begin()
    world.end(0, Exit(0))
    world.ready(1, failed=True)
    world.end(1, Exit(1))
    world.wake("slow 1")
    assert world.said.endswith("the job has failed, and waits for Process 2 (rank 2, on a)\n")
    world.wake("late 1")
    assert "Process 2 (rank 2, on a) has not ended within 600 seconds: it is killed" in world.said
    assert not world.policy.undecided


def test_a_new_process_that_ends_well_before_init_ends_no_job() -> None:
    world = PolicyWorld({"a": 2}, least=1)
    world.begin()
    world.hosts({"a": 2, "b": 2})
    world.end(2, Exit(0))
    assert "Process 2 (on b) ended with exit code 0 before it called hvd.init(). No new processes" in world.said
    world.ready(3)
    world.end(3, Exit(0))
    assert "Process 3 (on b) ended with exit code 0 while it waited for a rank." in world.said
    world.end(1)
    world.ready(0, failed=True)
    world.connect()
    assert world.ranks() == [0]
    world.end(0, Exit(0))
    assert not (world.policy.undecided or world.policy.stopped or world.policy.first_failure)


def test_a_new_process_that_ends_well_before_it_comes_to_the_others_ends_no_job() -> None:
    world = PolicyWorld({"a": 2}, least=1)
    world.begin()
    world.hosts({"a": 2, "b": 2})
    world.ready(2, 3)
    world.in_run |= {0, 1}
    world.ready(0, 1)
    world.connect()
    world.do(world.policy.on_message(3, Connected(2, in_run=True)))
    world.in_run.add(3)
    world.end(2, Exit(0))
    assert "Process 2 (rank 2, on b) ended with exit code 0 before it reached hvd.elastic.run. No new" in world.said
    world.ready(0, 1, 3, failed=True)
    world.connect()
    assert world.ranks() == [0, 1, 3]
    world.end(3, Exit(0))
    world.ready(0, failed=True)
    assert "Process 3 (rank 2, on b) ended with exit code 0 before 1 other rank had finished" in world.policy.stopped


@pytest.mark.parametrize("asks_first", [True, False])
def test_ranks_that_wait_in_init_learn_of_others_that_never_call_it(asks_first: bool) -> None:
    world = PolicyWorld({"a": 2}, least=2, fixed=True)
    for act in [lambda: world.ready(1), lambda: world.end(0, Exit(0))][:: 1 if asks_first else -1]:
        act()
    early = "Process 0 (on a) ended with exit code 0 before it called hvd.init()"
    assert early in world.said
    assert world.policy.stopped == f"1 rank of at least 2 is left, and no more can be started: {early}"
    assert world.dismissed == {1: True}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_a_rank_that_fails_in_the_last_round_fails_the_job_whenever_others_end_well(order: tuple[int, ...]) -> None:
    world = PolicyWorld({"a": 3}, least=1)
    world.begin()
    for number in order:
        world.end(number, Exit(3 if number == 2 else 0))
    assert world.policy.first_failure is not None
    assert (world.policy.first_failure.culprit, world.policy.first_failure.exit) == (2, Exit(3))


@pytest.mark.parametrize("newcomer_fails_first", [True, False])
@pytest.mark.parametrize("rank_fails", [True, False])
def test_a_process_without_a_rank_does_not_fail_a_job_that_ends_well(
    rank_fails: bool, newcomer_fails_first: bool
) -> None:
    world = PolicyWorld({"a": 2}, least=1)
    world.begin()
    world.hosts({"a": 2, "b": 1})
    if newcomer_fails_first:
        world.end(2, Exit(7))
    world.end(1, Exit(3 if rank_fails else 0))
    if 2 in world.alive:  # it is ended as soon as a rank has ended well
        world.end(2, Exit(7))
    world.end(0, Exit(0))
    failure = world.policy.first_failure
    assert (failure and failure.culprit) == (1 if rank_fails else None)


def test_a_signal_ends_the_job() -> None:
    world = PolicyWorld({"a": 2})
    world.begin()
    assert any(isinstance(each, EndAll) for each in world.policy.signalled(signal.SIGTERM))
    assert world.policy.ended(0, KILLED) == []


def test_no_more_ranks_than_allowed() -> None:
    world = PolicyWorld({"a": 4, "b": 4}, least=2, most=5)
    world.begin()
    assert len(world.assignments) == 5
    world.end(4)
    world.ready(0, 1, 2, 3, failed=True)
    world.connect()
    assert len(world.assignments) == 4


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_hosts_that_come_and_go(seed: int) -> None:
    """Whatever happens: ranks are a permutation, sizes are within bounds, rank 0 has the state, and the job goes on."""
    chance = random.Random(seed)
    present = {f"host{number}": chance.randint(1, 4) for number in range(200)}
    world = PolicyWorld(present, least=50, most=600, cooldown=(1, 8))
    world.begin()
    trained: set[int] = set(world.assignments)
    spare = 200
    for _ in range(60):
        happens = chance.random()
        if happens < 0.4:
            for number in chance.sample(sorted(world.assignments), min(3, len(world.assignments))):
                world.end(number)
        elif happens < 0.6:
            present[f"host{spare}"] = chance.randint(1, 4)
            spare += 1
            world.hosts(present)
        elif happens < 0.75 and len(present) > 100:
            del present[chance.choice(sorted(present))]
            world.hosts(present)
        for reason in [each for each in world.timers if each.startswith("cooldown")]:
            if chance.random() < 0.5:
                world.wake(reason)
        waiting = [each for each in world.alive if each not in world.assignments and each not in world.dismissed]
        world.ready(*[each for each in waiting if world.asked[each] < 0 and chance.random() < 0.8])
        if world.announced or (world.ended_rounds and world.ended_rounds[-1] == world.policy.round):
            world.ready(*sorted(world.assignments))
        for number in [each for each in world.dismissed if each in world.alive]:
            world.end(number, Exit(0))
        check(world, trained)
        world.connect()
        trained |= set(world.assignments)
    assert not world.policy.stopped
    assert world.policy.round > 20


def check(world: PolicyWorld, trained: Iterable[int]) -> None:
    ranks = world.ranks()
    assert 50 <= len(ranks) <= 600
    assert [world.assignments[number].rank for number in ranks] == list(range(len(ranks)))
    assert ranks[0] in set(trained)
    by_host: dict[str, list[int]] = {}
    for number in ranks:
        by_host.setdefault(world.assignments[number].hostname, []).append(world.assignments[number].local_rank)
    for host, local in by_host.items():
        assert sorted(local) == list(range(len(local))), host
    survivors = [number for number in ranks if number in set(trained)]
    assert survivors == sorted(survivors, key=lambda number: world.assignments[number].rank)


def test_a_job_of_scripts_that_go_on_begins_with_all_ranks_and_takes_no_process_that_comes_late() -> None:
    world = PolicyWorld({"a": 3}, least=1, start=2, fixed=True, continues=True)
    world.ready(0)
    world.wake("starting")
    assert not world.assignments
    world.ready(1)
    assert world.ranks() == [0, 1]
    world.connect()
    assert world.killed == [2]
    world.end(1)
    world.ready(0, failed=True)
    assert world.ranks() == [0]


def test_a_job_of_scripts_that_go_on_ends_with_rank_0() -> None:
    world = PolicyWorld({"a": 3}, least=1, start=3, fixed=True, continues=True)
    world.begin()
    world.end(1)
    world.ready(0, 2, failed=True)
    assert world.ranks() == [0, 2]
    world.connect()
    world.end(0)
    world.ready(2, failed=True)
    assert world.dismissed == {2: True}
    assert "rank 0 was lost" in world.reasons[2]


def test_a_job_of_scripts_that_go_on_ends_if_a_rank_is_lost_before_the_first_round_runs() -> None:
    world = PolicyWorld({"a": 3}, least=1, start=3, fixed=True, continues=True)
    world.ready(0, 1, 2)
    world.end(2)
    world.ready(0, 1, failed=True)
    assert world.dismissed == {0: True, 1: True}
    assert "2 ranks of at least 3" in world.reasons[0]
