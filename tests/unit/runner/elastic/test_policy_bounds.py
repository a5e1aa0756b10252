"""Nothing waits without a bound in an elastic job, and who waits says for what: decided without any process."""

from __future__ import annotations

import pytest

from elastic_policy_world import KILLED, PolicyWorld
from horovod.control.elastic_messages import HostUpdateResult, Leaving
from horovod.runner.agent.messages import Exit


def test_a_rank_that_neither_comes_nor_ends_holds_up_the_others_for_the_elastic_timeout() -> None:
    world = PolicyWorld({"a": 3}, least=2)
    world.begin()
    world.ready(0, 2, failed=True)
    world.wake("slow 1")
    assert "the next round waits for Process 1 (rank 1, on a)" in world.said
    world.wake("late 1")
    assert world.killed == [1]
    assert "Process 1 (rank 1, on a) has not come to the next round within 600 seconds: it is killed" in world.said
    assert world.ranks() == [0, 2]


def test_a_rank_that_comes_late_to_a_round_is_not_killed_in_that_one() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.begin()
    world.ready(0, failed=True)
    world.ready(1, failed=True)
    world.connect()
    world.wake("late 1")
    assert not world.killed and world.ranks() == [0, 1]


def test_a_process_that_is_not_needed_any_more_and_does_not_end_is_stopped() -> None:
    world = PolicyWorld({"a": 1, "b": 1})
    world.begin()
    world.hosts({"a": 1})
    world.ready(0, 1, keep=True)
    assert world.dismissed == {1: False}
    world.connect()
    world.wake("gone 1")
    assert world.killed == [1] and world.ranks() == [0]


def test_a_process_that_is_not_needed_any_more_ends_at_once() -> None:
    world = PolicyWorld({"a": 3})
    world.begin()
    world.end(0, Exit(0))
    world.ready(1, failed=True)
    assert world.dismissed == {1: True}, "process 2 may train on for hours"
    world.wake("gone 1")
    assert world.killed == [1]
    world.end(2, Exit(0))
    assert not world.policy.undecided and world.policy.first_failure is None and world.policy.stopped


def test_the_time_to_wait_for_ranks_does_not_end_a_round_that_runs() -> None:
    """Of a round and a wait that have the same number, too."""
    world = PolicyWorld({"a": 2, "b": 1}, least=2)
    world.begin()
    world.end(0)
    world.end(1)
    world.ready(2, failed=True)
    world.hosts({"a": 2, "b": 1, "c": 2})
    world.ready(3, 4)
    world.connect()
    world.do(world.policy.on_message(3, Leaving(2)))
    assert world.announced
    for reason in ("patience 1", "late 1"):
        world.wake(reason)
    assert not world.policy.stopped


def test_the_time_to_wait_begins_anew_after_there_were_enough() -> None:
    world = PolicyWorld({"a": 2}, least=2, cooldown=(10, 20))
    world.end(1)
    world.ready(0)
    assert "patience 1" in world.timers
    world.hosts({"a": 2, "b": 2})
    world.wake("patience 1")
    assert not world.policy.stopped, "there are enough as soon as the new ones have started"
    world.ready(2, 3)
    assert world.ranks() == [0, 2, 3]


# SIGTERM, where nobody else can go on.


def test_the_only_rank_with_the_state_passes_it_on_before_it_ends() -> None:
    world = PolicyWorld({"a": 1, "b": 1}, least=1, start=1, most=1)
    world.begin()
    world.do(world.policy.on_message(0, Leaving(1)))
    assert world.announced == HostUpdateResult.removed
    world.ready(0, keep=True)
    assert world.policy.round == 1, "a round of itself alone would be interrupted at once, again and again"
    world.ready(1)
    assert world.ranks() == [0, 1], "also where one rank is the most: to hand on the state takes two"
    world.connect()
    world.ready(0, 1, keep=True)
    assert world.ranks() == [1] and world.dismissed == {0: False}


def test_the_only_rank_of_fixed_hosts_that_is_told_to_end_may_save_its_state() -> None:
    world = PolicyWorld({"a": 1}, least=1, fixed=True)
    world.begin()
    world.do(world.policy.on_message(0, Leaving(1)))
    world.ready(0, keep=True)
    assert world.dismissed == {0: True}
    assert world.policy.stopped == "0 ranks of at least 1 are left, and no more can be started"


def test_a_rank_that_is_told_to_end_goes_although_too_few_are_left() -> None:
    world = PolicyWorld({"a": 1, "b": 1}, least=2)
    world.begin()
    world.do(world.policy.on_message(1, Leaving(1)))
    world.ready(0, 1, keep=True)
    assert world.dismissed == {1: False}, "process 0 has the state"
    assert "1 rank of at least 2 is left; waiting for more" in world.said


# Hosts that flap.


def test_a_host_that_comes_back_does_not_make_more_ranks_than_allowed() -> None:
    world = PolicyWorld({"a": 2, "b": 1}, least=1, most=2)
    world.begin()
    assert world.ranks() == [0, 1]
    world.hosts({"b": 1})
    assert set(world.alive) == {0, 1, 2}
    world.ready(2)
    assert world.announced
    world.hosts({"b": 1, "a": 2})
    assert world.killed == [2], "those that have trained stay"
    world.ready(0, 1, keep=True)
    assert world.ranks() == [0, 1] and world.same_state


def test_withdrawn_hosts_are_kept_over_a_failure_while_too_few_would_be_left() -> None:
    world = PolicyWorld({"a": 2, "b": 2}, least=3)
    world.begin()
    world.hosts({"a": 2})
    world.ready(0, 1, 2, 3, failed=True)
    assert world.ranks() == [0, 1, 2]


# Jobs that cannot begin.


@pytest.mark.parametrize("cooldown", [None, (10, 100)])
def test_when_all_processes_have_failed_the_job_ends_at_once(cooldown: tuple[int, int] | None) -> None:
    world = PolicyWorld({"a": 1, "b": 1}, least=2, cooldown=cooldown)
    world.end(0, Exit(2))
    world.end(1, Exit(2))
    assert world.policy.stopped == "all processes have failed"
    assert not world.policy.undecided
    assert world.policy.first_failure is not None and world.policy.first_failure.exit == Exit(2)


def test_when_all_hosts_have_failed_before_the_first_round_the_job_ends_at_once() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.end(1, Exit(2))
    world.ready(0)
    assert (
        world.policy.stopped == "1 rank of at least 2 is left, and no more can be started: processes have failed on a"
    )
    assert world.dismissed == {0: True}


def test_hosts_that_come_back_are_waited_for() -> None:
    world = PolicyWorld({"a": 2}, least=2, cooldown=(1, 2))
    world.end(1, Exit(2))
    world.ready(0)
    assert not world.policy.stopped
    world.wake("cooldown a")
    world.ready(2)
    assert world.ranks() == [0, 2]


def test_ranks_that_have_the_state_wait_for_other_hosts() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.begin()
    world.end(1)
    world.ready(0, failed=True)
    assert not world.policy.stopped
    assert "1 rank of at least 2 is left; waiting for more" in world.said


def test_a_process_that_is_stopped_with_its_host_has_not_failed() -> None:
    world = PolicyWorld({"a": 2}, least=2)
    world.hosts({})
    assert world.killed == [0, 1]
    assert not world.policy.stopped


def test_a_job_that_waits_says_for_what_and_only_once() -> None:
    world = PolicyWorld({"a": 1}, least=2)
    assert not world.said
    world.wake("silent 0")
    assert world.said == "horovodrun: waiting for at least 2 slots; 1 slot there (a:1)\n"
    world.hosts({"a": 1})
    assert "silent 0" not in world.timers
    world.hosts({"a": 1, "b": 1})
    world.end(1)
    world.ready(0)
    world.wake("silent 0")
    assert world.said.endswith("horovodrun: waiting for at least 2 ranks; 1 rank there\n")


def test_a_host_that_gets_no_new_processes_after_a_rank_of_it_was_told_to_end_is_named() -> None:
    world = PolicyWorld({"a": 1, "b": 1})
    world.begin()
    world.do(world.policy.on_message(1, Leaving(1)))
    world.ready(0, 1, keep=True)
    world.end(1, Exit(0))
    assert "Process 1 (on b) has left, as it was asked to. No new processes are started on b." in world.said
    assert world.policy.first_failure is None and KILLED not in world.policy.exits.values()
