"""What answers and their absence amount to, told to an detector with made-up times."""

from __future__ import annotations

import pytest

from horovod.control.failure_detector import (
    NO_PROGRESS_REPORTS,
    STUCK,
    UNABLE,
    UNRESPONSIVE,
    UNSEEN_CHECKS,
    FailureDetector,
)

ANSWER = 10.0


@pytest.fixture
def detector() -> FailureDetector:
    return FailureDetector(ANSWER)


def answer_all(detector: FailureDetector, peers: list[int], now: float) -> None:
    for peer in peers:
        detector.answered(peer, now)


def report_no_progress(
    detector: FailureDetector, times: int, asked: float, answered: float, peers: tuple[int, ...] = (1, 2)
) -> None:
    """Rank 2 complains of rank 1; all are asked, and answer."""
    detector.report_no_progress(2, 1, "stuck", times)
    detector.ask(peers, asked)
    answer_all(detector, list(peers), answered)


def test_a_rank_with_an_unanswered_ping_is_not_pinged(detector: FailureDetector) -> None:
    assert detector.ask([1, 2], 0) == [1, 2]
    detector.answered(2, 1)
    assert detector.ask([1, 2], 2) == [2]
    detector.answered(1, 3)
    detector.left(2)
    assert detector.due() is None
    assert detector.ask([1], 4) == [1]


def test_a_process_that_does_not_answer_is_inspected_repeatedly(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    detector.ask([2], 5)
    assert detector.due() == 10 and detector.overdue(9.9) == []
    assert detector.overdue(10) == [1] and detector.overdue(10) == []
    assert detector.due() == 15 and detector.overdue(20) == [1, 2]


def test_a_process_that_is_seen_stopped_twice_is_lost(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    detector.overdue(10)
    assert detector.process_seen(1, "stopped", 10) is None
    assert detector.process_seen(1, "stopped", 10) is None, "another who sees it: the same look"
    assert detector.failure is None and detector.due() == 15
    detector.overdue(15)
    detector.process_seen(1, "stopped", 15)
    assert detector.failure[:2] == (1, "stopped")


def test_a_process_that_goes_on_between_two_looks_is_not_lost(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    for now, found in ((10, "stopped"), (15, ""), (25, "stopped"), (30, "")):
        assert detector.overdue(now) == [1]
        detector.process_seen(1, found, now)
    assert detector.failure is None


def test_reports_about_a_peer_that_has_answered_are_ignored(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    detector.overdue(10)
    detector.answered(1, 11)
    assert detector.process_seen(1, "stopped", 12) is None
    detector.ask([1], 13)
    assert detector.process_seen(1, "stopped", 14) is None, "nobody was asked to look yet"
    detector.overdue(23)
    detector.process_seen(1, "stopped", 23)
    assert detector.failure is None


def test_a_running_process_is_waited_for_without_limit_with_rarer_warnings(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    told = []
    for check in range(1, 10_001):
        now = ANSWER * check
        assert detector.overdue(now) == [1]
        told += [silent for silent in [detector.process_seen(1, "", now)] if silent is not None]
    assert detector.failure is None
    assert told[:4] == [10, 20, 40, 80] and len(told) == 14


def test_a_process_that_runs_is_waited_for_as_long_as_the_user_wants() -> None:
    detector = FailureDetector(ANSWER, 60)
    detector.ask([1], 0)
    detector.overdue(3600)
    detector.process_seen(1, "", 3600)
    assert detector.failure is None, "an hour that nobody lived through"
    for check in range(1, 6):
        assert detector.failure is None
        detector.overdue(3600 + ANSWER * check)
        detector.process_seen(1, "", 3600 + ANSWER * check)
    assert detector.failure[:2] == (1, UNABLE.format(60))


def test_an_invisible_peer_is_lost_after_enough_checks(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    for check in range(1, UNSEEN_CHECKS):
        detector.overdue(ANSWER * check)
    assert detector.failure is None
    detector.overdue(ANSWER * UNSEEN_CHECKS)
    assert detector.failure[:2] == (1, UNRESPONSIVE)


def test_a_suspended_machine_counts_as_one_missed_check(detector: FailureDetector) -> None:
    """A job that a scheduler has suspended, or a virtual machine."""
    detector.ask([1], 0)
    detector.overdue(3600)
    assert detector.failure is None


def test_a_suspicion_is_believed_once_all_have_answered(detector: FailureDetector) -> None:
    detector.suspect(1, "first")
    detector.suspect(2, "second")
    detector.ask([1, 2], 0)
    detector.answered(1, 1)
    assert detector.failure is None
    detector.answered(2, 1)
    assert detector.failure[:2] == (1, "first")


def test_a_suspicion_does_not_wait_for_a_rank_that_only_cannot_answer_now(detector: FailureDetector) -> None:
    detector.suspect(1, "first")
    detector.ask([1, 2], 0)
    detector.answered(1, 1)
    detector.overdue(10)
    detector.process_seen(2, "", 10)
    assert detector.failure[:2] == (1, "first")


def test_a_suspicion_blames_the_rank_that_does_not_answer(detector: FailureDetector) -> None:
    detector.suspect(1, "first")
    detector.ask([1, 2], 0)
    detector.answered(1, 1)
    detector.overdue(10)
    assert detector.failure is None, "somebody else may see it"
    detector.overdue(20)
    assert detector.failure[:2] == (2, UNRESPONSIVE)


def test_a_suspicion_blames_the_rank_that_is_stopped(detector: FailureDetector) -> None:
    detector.suspect(1, "first")
    detector.ask([1, 2], 0)
    detector.answered(1, 1)
    for now in (10, 15):
        detector.overdue(now)
        assert detector.failure is None
        detector.process_seen(2, "stopped", now)
    assert detector.failure[:2] == (2, "stopped")


def test_reports_of_one_wait_add_up(detector: FailureDetector) -> None:
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        assert detector.failure is None
        report_no_progress(detector, times, 10 * times, 10 * times + 1)
    assert detector.failure[:2] == (1, STUCK.format("stuck"))


def test_reports_of_several_waits_do_not(detector: FailureDetector) -> None:
    for number in range(20):
        report_no_progress(detector, 1 + number % (NO_PROGRESS_REPORTS - 1), 10 * number, 10 * number + 1)
    assert detector.failure is None


def test_reports_of_several_ranks_do_not(detector: FailureDetector) -> None:
    for reporter in range(2, 20):
        detector.report_no_progress(reporter, 1, "stuck", 1)
    detector.ask([1, 2], 0)
    answer_all(detector, [1, 2], 1)
    assert detector.failure is None


@pytest.mark.parametrize("late", [1, 2])
def test_no_rank_is_blamed_while_another_answers_late(detector: FailureDetector, late: int) -> None:
    """It is what the other may wait for; and it needs time to go on itself."""
    for times in range(1, NO_PROGRESS_REPORTS):
        report_no_progress(detector, times, 10 * times, 10 * times + 1)
    detector.report_no_progress(2, 1, "stuck", NO_PROGRESS_REPORTS)
    detector.ask([1, 2], 100)
    detector.answered(3 - late, 100)
    detector.answered(late, 106)
    assert detector.failure is None
    for times in range(NO_PROGRESS_REPORTS + 1, 2 * NO_PROGRESS_REPORTS):
        report_no_progress(detector, times, 100 + 10 * times, 100 + 10 * times)
        assert detector.failure is None
    report_no_progress(detector, 2 * NO_PROGRESS_REPORTS, 200, 200)
    assert detector.failure[:2] == (1, STUCK.format("stuck"))


def test_reports_that_have_gathered_count_once(detector: FailureDetector) -> None:
    """Rank 0 itself could not read them meanwhile."""
    detector.ask([1, 2], 0)
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        detector.report_no_progress(2, 1, "stuck", times)
    answer_all(detector, [1, 2], 1)
    assert detector.failure is None


def test_reports_count_at_once_if_no_rank_can_be_pinged(detector: FailureDetector) -> None:
    for times in range(1, NO_PROGRESS_REPORTS + 1):
        report_no_progress(detector, times, 10 * times, 10 * times, peers=())
    assert detector.failure[:2] == (1, STUCK.format("stuck"))


def test_the_first_failure_stays(detector: FailureDetector) -> None:
    detector.suspect(1, "first")
    detector.ask([], 0)
    detector.suspect(2, "second")
    detector.ask([], 0)
    assert detector.failure[:2] == (1, "first")


def test_after_the_end_nothing_is_due(detector: FailureDetector) -> None:
    detector.ask([1], 0)
    detector.close()
    assert detector.due() is None and detector.overdue(100) == []
