"""What answers and their absence amount to, told to an inquiry with made-up times."""

from __future__ import annotations

import pytest

from horovod.control.failure_detector import NO_PROGRESS_REPORTS, SILENT, STUCK, UNABLE, UNSEEN_CHECKS, FailureDetector

ANSWER = 10.0


@pytest.fixture
def inquiry() -> FailureDetector:
    return FailureDetector(ANSWER)


def answer_all(inquiry: FailureDetector, peers: list[int], now: float) -> None:
    for peer in peers:
        inquiry.answered(peer, now)


def report_no_progress(
    inquiry: FailureDetector, times: int, asked: float, answered: float, peers: tuple[int, ...] = (1, 2)
) -> None:
    """Rank 2 complains of rank 1; all are asked, and answer."""
    inquiry.report_no_progress(2, 1, "stuck", times)
    inquiry.ask(peers, asked)
    answer_all(inquiry, list(peers), answered)


def test_nobody_is_asked_while_it_owes_an_answer(inquiry: FailureDetector) -> None:
    assert inquiry.ask([1, 2], 0) == [1, 2]
    inquiry.answered(2, 1)
    assert inquiry.ask([1, 2], 2) == [2]
    inquiry.answered(1, 3)
    inquiry.left(2)
    assert inquiry.due() is None
    assert inquiry.ask([1], 4) == [1]


def test_who_does_not_answer_is_looked_after_again_and_again(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    inquiry.ask([2], 5)
    assert inquiry.due() == 10 and inquiry.overdue(9.9) == []
    assert inquiry.overdue(10) == [1] and inquiry.overdue(10) == []
    assert inquiry.due() == 15 and inquiry.overdue(20) == [1, 2]


def test_a_process_that_is_seen_stopped_twice_is_lost(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    inquiry.overdue(10)
    assert inquiry.testify(1, "stopped", 10) is None
    assert inquiry.testify(1, "stopped", 10) is None, "another who sees it: the same look"
    assert inquiry.failure is None and inquiry.due() == 15
    inquiry.overdue(15)
    inquiry.testify(1, "stopped", 15)
    assert inquiry.failure == (1, "stopped")


def test_a_process_that_goes_on_between_two_looks_is_not_lost(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    for now, found in ((10, "stopped"), (15, ""), (25, "stopped"), (30, "")):
        assert inquiry.overdue(now) == [1]
        inquiry.testify(1, found, now)
    assert inquiry.failure is None


def test_what_is_seen_of_a_peer_that_has_answered_is_of_no_interest(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    inquiry.overdue(10)
    inquiry.answered(1, 11)
    assert inquiry.testify(1, "stopped", 12) is None
    inquiry.ask([1], 13)
    assert inquiry.testify(1, "stopped", 14) is None, "nobody was asked to look yet"
    inquiry.overdue(23)
    inquiry.testify(1, "stopped", 23)
    assert inquiry.failure is None


def test_a_process_that_runs_is_waited_for_without_end_and_told_of_ever_more_rarely(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    told = []
    for check in range(1, 10_001):
        now = ANSWER * check
        assert inquiry.overdue(now) == [1]
        told += [silent for silent in [inquiry.testify(1, "", now)] if silent is not None]
    assert inquiry.failure is None
    assert told[:4] == [10, 20, 40, 80] and len(told) == 14


def test_a_process_that_runs_is_waited_for_as_long_as_the_user_wants() -> None:
    inquiry = FailureDetector(ANSWER, 60)
    inquiry.ask([1], 0)
    inquiry.overdue(3600)
    inquiry.testify(1, "", 3600)
    assert inquiry.failure is None, "an hour that nobody lived through"
    for check in range(1, 6):
        assert inquiry.failure is None
        inquiry.overdue(3600 + ANSWER * check)
        inquiry.testify(1, "", 3600 + ANSWER * check)
    assert inquiry.failure == (1, UNABLE.format(60))


def test_a_peer_that_nobody_sees_is_lost_in_the_end(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    for check in range(1, UNSEEN_CHECKS):
        inquiry.overdue(ANSWER * check)
    assert inquiry.failure is None
    inquiry.overdue(ANSWER * UNSEEN_CHECKS)
    assert inquiry.failure == (1, SILENT)


def test_an_hour_that_nobody_lived_through_counts_once(inquiry: FailureDetector) -> None:
    """A job that a scheduler has suspended, or a virtual machine."""
    inquiry.ask([1], 0)
    inquiry.overdue(3600)
    assert inquiry.failure is None


def test_a_suspicion_is_believed_once_all_have_answered(inquiry: FailureDetector) -> None:
    inquiry.suspect(1, "first")
    inquiry.suspect(2, "second")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    assert inquiry.failure is None
    inquiry.answered(2, 1)
    assert inquiry.failure == (1, "first")


def test_a_suspicion_does_not_wait_for_a_rank_that_only_cannot_answer_now(inquiry: FailureDetector) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    inquiry.overdue(10)
    inquiry.testify(2, "", 10)
    assert inquiry.failure == (1, "first")


def test_a_suspicion_finds_who_does_not_answer(inquiry: FailureDetector) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    inquiry.overdue(10)
    assert inquiry.failure is None, "somebody else may see it"
    inquiry.overdue(20)
    assert inquiry.failure == (2, SILENT)


def test_a_suspicion_finds_who_is_stopped(inquiry: FailureDetector) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    for now in (10, 15):
        inquiry.overdue(now)
        assert inquiry.failure is None
        inquiry.testify(2, "stopped", now)
    assert inquiry.failure == (2, "stopped")


def test_complaints_of_one_wait_add_up(inquiry: FailureDetector) -> None:
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        assert inquiry.failure is None
        report_no_progress(inquiry, times, 10 * times, 10 * times + 1)
    assert inquiry.failure == (1, STUCK.format("stuck"))


def test_complaints_of_several_waits_do_not(inquiry: FailureDetector) -> None:
    for number in range(20):
        report_no_progress(inquiry, 1 + number % (NO_PROGRESS_REPORTS - 1), 10 * number, 10 * number + 1)
    assert inquiry.failure is None


def test_complaints_of_several_ranks_do_not(inquiry: FailureDetector) -> None:
    for reporter in range(2, 20):
        inquiry.report_no_progress(reporter, 1, "stuck", 1)
    inquiry.ask([1, 2], 0)
    answer_all(inquiry, [1, 2], 1)
    assert inquiry.failure is None


@pytest.mark.parametrize("late", [1, 2])
def test_while_anybody_answers_late_nobody_is_to_blame(inquiry: FailureDetector, late: int) -> None:
    """It is what the other may wait for; and it needs time to go on itself."""
    for times in range(1, NO_PROGRESS_REPORTS):
        report_no_progress(inquiry, times, 10 * times, 10 * times + 1)
    inquiry.report_no_progress(2, 1, "stuck", NO_PROGRESS_REPORTS)
    inquiry.ask([1, 2], 100)
    inquiry.answered(3 - late, 100)
    inquiry.answered(late, 106)
    assert inquiry.failure is None
    for times in range(NO_PROGRESS_REPORTS + 1, 2 * NO_PROGRESS_REPORTS):
        report_no_progress(inquiry, times, 100 + 10 * times, 100 + 10 * times)
        assert inquiry.failure is None
    report_no_progress(inquiry, 2 * NO_PROGRESS_REPORTS, 200, 200)
    assert inquiry.failure == (1, STUCK.format("stuck"))


def test_complaints_that_have_gathered_count_once(inquiry: FailureDetector) -> None:
    """Rank 0 itself could not read them meanwhile."""
    inquiry.ask([1, 2], 0)
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        inquiry.report_no_progress(2, 1, "stuck", times)
    answer_all(inquiry, [1, 2], 1)
    assert inquiry.failure is None


def test_where_nobody_is_left_to_ask_complaints_count_at_once(inquiry: FailureDetector) -> None:
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        report_no_progress(inquiry, times, 10 * times, 10 * times, peers=())
    assert inquiry.failure == (1, STUCK.format("stuck"))


def test_the_first_failure_stays(inquiry: FailureDetector) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([], 0)
    inquiry.suspect(2, "second")
    inquiry.ask([], 0)
    assert inquiry.failure == (1, "first")


def test_after_the_end_nothing_is_due(inquiry: FailureDetector) -> None:
    inquiry.ask([1], 0)
    inquiry.close()
    assert inquiry.due() is None and inquiry.overdue(100) == []
