"""What a job does about ranks that end, accuse one another, or are lost: decided without any process."""

from __future__ import annotations

import random
import signal
from collections.abc import Collection, Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.control.processes import STOPPED
from horovod.runner.agent.messages import Exit
from horovod.runner.output.outcome import ReportedFailure
from horovod.runner.policy import Decision, EndAll, FirstFailure, LookAtAll, Say, StaticPolicy, Wake


def job(size: int, reader: int | None = None) -> StaticPolicy:
    return StaticPolicy(range(size), reader)


def ended(
    policy: StaticPolicy,
    rank: int,
    end: Exit,
    reported: ReportedFailure | None,
    stopped: Collection[int] = (),
    also: Mapping[int, Exit] = MappingProxyType({}),
) -> list[Decision]:
    """A rank ends, and the agents report which are ``stopped`` and which have ``also`` ended, if the policy wants to know."""
    decisions = policy.ended(rank, end, reported)
    if decisions != [LookAtAll()]:
        return decisions
    more = [each for other, found in also.items() for each in policy.ended(other, found, reported)]
    return [*more, *policy.looked(stopped, reported)]


def words(decisions: object) -> str:
    assert isinstance(decisions, list)
    return " ".join(decision.text for decision in decisions if isinstance(decision, Say))


def test_ranks_that_do_well_need_no_decision() -> None:
    policy = job(2)
    assert ended(policy, 1, Exit(0), None) == []
    assert ended(policy, 0, Exit(0), None) == []
    assert (policy.first_failure, policy.running) == (None, frozenset())


def test_the_others_may_say_what_they_saw_before_they_are_ended() -> None:
    policy = job(3)
    said, wake = ended(policy, 1, Exit(7), None)
    assert said == Say("horovodrun: Process 1 exit with status code 7. Terminating the 2 ranks that still run.")
    assert isinstance(wake, Wake)
    assert ended(policy, 0, Exit(1), None) == []
    assert [type(decision) for decision in policy.woken(wake.reason, None)] == [EndAll]
    assert policy.first_failure == FirstFailure(1, 1, Exit(7), "")
    assert policy.woken(wake.reason, None) == []


def test_the_job_ends_at_once_when_the_last_one_has_said_what_it_saw() -> None:
    policy = job(2)
    ended(policy, 1, Exit(7), None)
    assert [type(decision) for decision in ended(policy, 0, Exit(1), None)] == [EndAll]


def test_a_victim_that_ends_first_is_not_blamed() -> None:
    policy, reported = job(2), ReportedFailure(1, "left")
    (wake,) = ended(policy, 0, Exit(1), reported)
    assert isinstance(wake, Wake)
    said, _ = ended(policy, 1, Exit(9), reported)
    assert said == Say("horovodrun: Process 1 exit with status code 9.")
    assert policy.first_failure == FirstFailure(1, 1, Exit(9), "left")


def test_a_hanging_culprit_is_named_with_its_first_victims_exit_code() -> None:
    policy, reported = job(2), ReportedFailure(1, "hangs")
    (wake,) = ended(policy, 0, Exit(5), reported)
    assert isinstance(wake, Wake)
    decisions = policy.woken(wake.reason, reported)
    assert words(decisions).startswith(
        "horovodrun: Process 0 exit with status code 5. Rank 1 failed first. Terminating"
    )
    assert policy.first_failure == FirstFailure(1, 0, Exit(5), "hangs")


def test_a_rank_that_does_not_exist_cannot_be_blamed() -> None:
    policy = job(1)
    ended(policy, 0, Exit(5), ReportedFailure(77, "nonsense"))
    assert policy.first_failure == FirstFailure(0, 0, Exit(5), "")


def test_ranks_that_are_lost_with_their_host_say_why() -> None:
    policy = job(2)
    decisions = ended(policy, 1, Exit(255, reason="host b is gone"), None)
    assert "Process 1 exit with status code 255 (host b is gone)" in words(decisions)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_once(number: signal.Signals) -> None:
    policy = job(2)
    said, end = policy.signalled(number)
    assert said == Say(f"horovodrun: {number.name}: ending the job") and isinstance(end, EndAll)
    assert policy.signalled(number) == []
    assert ended(policy, 0, Exit(143, 15), None) == []
    assert policy.first_failure is None


def test_a_cancelled_batch_job_is_named_once_although_its_ranks_end_first() -> None:
    policy = StaticPolicy(range(4), None, "Slurm's job 7")
    (wake,) = ended(policy, 2, Exit(143, signal.SIGTERM), None)  # all processes are signalled at the same moment
    assert isinstance(wake, Wake) and policy.undecided
    assert [decision for rank in (0, 1, 3) for decision in ended(policy, rank, Exit(143, signal.SIGTERM), None)] == []
    said, end = policy.signalled(signal.SIGTERM)
    assert "SIGTERM, as when Slurm's job 7 is cancelled or reaches its time limit: ending" in words([said])
    assert isinstance(end, EndAll) and policy.first_failure is None and not policy.undecided


def test_a_rank_that_somebody_terminated_is_named_after_a_moment() -> None:
    policy = job(2)
    (wake,) = ended(policy, 0, Exit(143, signal.SIGTERM), None)
    assert ended(policy, 1, Exit(1), None) == [] and policy.undecided
    assert isinstance(wake, Wake)
    assert "Process 0 exit with status code 143" in words(policy.woken(wake.reason, None))
    assert policy.first_failure is not None and policy.first_failure.culprit == 0 and not policy.undecided


def test_a_rank_that_ends_of_a_ctrl_c_it_was_given_ends_the_job_as_ctrl_c() -> None:
    policy = job(2, reader=1)
    assert "Ctrl-C went to rank 1" in words(policy.interrupt_passed_on())
    assert words(policy.interrupt_passed_on()) == ""
    assert [type(decision) for decision in ended(policy, 1, Exit(130, 2), None)] == [EndAll]
    assert policy.interrupted == signal.SIGINT and policy.first_failure is None


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_ctrl_c_that_finds_its_rank_at_its_end_ends_the_job(code: int) -> None:
    policy = job(2, reader=1)
    policy.interrupt_passed_on()
    assert [type(decision) for decision in ended(policy, 1, Exit(code), None)] == [EndAll]
    assert policy.interrupted == signal.SIGINT and policy.first_failure is None


def test_a_rank_that_goes_on_after_a_ctrl_c_may_end_without_the_others() -> None:
    policy = job(2, reader=1)
    (wake,) = [decision for decision in policy.interrupt_passed_on() if isinstance(decision, Wake)]
    assert policy.woken(wake.reason, None) == []
    assert ended(policy, 1, Exit(0), None) == []
    assert not policy.interrupted


def test_the_last_rank_that_answers_a_ctrl_c_by_ending_well_has_not_been_interrupted() -> None:
    policy = job(1, reader=0)
    policy.interrupt_passed_on()
    assert ended(policy, 0, Exit(0), None) == []
    assert not policy.interrupted


def test_a_thousand_ranks_that_fall_in_any_order_have_one_failure_and_one_end() -> None:
    for seed in range(20):
        shuffled = random.Random(seed)
        policy, ranks = job(1000), list(range(1000))
        shuffled.shuffle(ranks)
        reported = ReportedFailure(ranks[500], "first of all")
        made = [decision for rank in ranks for decision in ended(policy, rank, Exit(1), reported)]
        assert sum(isinstance(decision, EndAll) for decision in made) == 1
        assert policy.first_failure is not None and policy.first_failure.culprit == ranks[500]
        assert words(made).count("exit with status code") == 1


KILLED = Exit(137, signal.SIGKILL)


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, int, bool, list[int], ReportedFailure | None]:
    """A job of so many ranks, the rank that is lost, whether it is stopped or else killed, the order in which the launcher
    hears of the ends of the others (and of its own), and what a rank has reported of another."""
    size = draw(st.integers(2, 6))
    lost = draw(st.integers(0, size - 1))
    is_stopped = draw(st.booleans())
    order = draw(st.permutations([rank for rank in range(size) if rank != lost or not is_stopped]))
    reported = draw(st.none() | st.builds(ReportedFailure, st.integers(0, size - 1), st.just("lost"), st.just(False)))
    return size, lost, is_stopped, list(order), reported


@given(losses(), st.integers(0, 6))
def test_what_the_launcher_sees_comes_before_what_ranks_say(
    loss: tuple[int, int, bool, list[int], ReportedFailure | None], together: int
) -> None:
    size, lost, is_stopped, order, reported = loss
    policy = job(size)
    exits = {rank: KILLED if rank == lost else Exit(1) for rank in order}
    # When the first end is seen, the lost rank has ended: nobody fails because of it before that.
    at_once = {rank: exits[rank] for rank in order[1 : 1 + together] if rank in order}
    if not is_stopped and lost != order[0]:
        at_once[lost] = KILLED
    stopped = {lost} if is_stopped else set()
    made = ended(policy, order[0], exits[order[0]], reported, stopped, at_once)
    for rank in order[1:]:
        if rank not in policy.exits:
            made += ended(policy, rank, exits[rank], reported)
    if policy.first_failure is None:
        made += policy.woken("reported", reported)
    assert policy.first_failure is not None and policy.first_failure.culprit == lost
    assert f"Rank {lost} failed first" in words(made) or policy.first_failure.ended == lost
    if is_stopped and (reported is None or reported.rank != lost):
        assert policy.first_failure.reason == STOPPED


def test_a_rank_that_says_of_itself_that_it_raised_is_to_blame_whatever_happened_to_others() -> None:
    policy = job(3)
    ended(policy, 1, Exit(1), ReportedFailure(1, "it raised KeyError", own=True), stopped=[2], also={0: KILLED})
    assert policy.first_failure == FirstFailure(1, 1, Exit(1), "it raised KeyError")


def test_a_stopped_rank_is_named_at_once_with_its_first_victims_exit_code() -> None:
    policy = job(2)
    decisions = ended(policy, 0, Exit(5), None, stopped=[1])
    assert words(decisions).startswith(
        "horovodrun: Process 0 exit with status code 5. Rank 1 failed first. Terminating"
    )
    assert policy.first_failure == FirstFailure(1, 0, Exit(5), STOPPED)
