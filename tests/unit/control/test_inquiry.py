"""What answers and their absence amount to, told to an inquiry with made-up times."""

from __future__ import annotations

import pytest

from horovod.control.inquiry import COMPLAINTS, SILENT, STUCK, UNABLE, UNSEEN_CHECKS, Inquiry

ANSWER = 10.0


@pytest.fixture
def inquiry() -> Inquiry:
    return Inquiry(ANSWER)


def answer_all(inquiry: Inquiry, peers: list[int], now: float) -> None:
    for peer in peers:
        inquiry.answered(peer, now)


def complain(inquiry: Inquiry, times: int, asked: float, answered: float, peers: tuple[int, ...] = (1, 2)) -> None:
    """Rank 2 complains of rank 1; all are asked, and answer."""
    inquiry.complain(2, 1, "stuck", times)
    inquiry.ask(peers, asked)
    answer_all(inquiry, list(peers), answered)


def test_nobody_is_asked_while_it_owes_an_answer(inquiry: Inquiry) -> None:
    assert inquiry.ask([1, 2], 0) == [1, 2]
    inquiry.answered(2, 1)
    assert inquiry.ask([1, 2], 2) == [2]
    inquiry.answered(1, 3)
    inquiry.left(2)
    assert inquiry.due() is None
    assert inquiry.ask([1], 4) == [1]


def test_who_does_not_answer_is_looked_after_again_and_again(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    inquiry.ask([2], 5)
    assert inquiry.due() == 10 and inquiry.overdue(9.9) == []
    assert inquiry.overdue(10) == [1] and inquiry.overdue(10) == []
    assert inquiry.due() == 15 and inquiry.overdue(20) == [1, 2]


def test_a_process_that_is_seen_stopped_twice_is_lost(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    inquiry.overdue(10)
    assert inquiry.testify(1, "stopped", 10) is None
    assert inquiry.testify(1, "stopped", 10) is None, "another who sees it: the same look"
    assert inquiry.verdict is None and inquiry.due() == 15
    inquiry.overdue(15)
    inquiry.testify(1, "stopped", 15)
    assert inquiry.verdict == (1, "stopped")


def test_a_process_that_goes_on_between_two_looks_is_not_lost(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    for now, found in ((10, "stopped"), (15, ""), (25, "stopped"), (30, "")):
        assert inquiry.overdue(now) == [1]
        inquiry.testify(1, found, now)
    assert inquiry.verdict is None


def test_what_is_seen_of_a_peer_that_has_answered_is_of_no_interest(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    inquiry.overdue(10)
    inquiry.answered(1, 11)
    assert inquiry.testify(1, "stopped", 12) is None
    inquiry.ask([1], 13)
    assert inquiry.testify(1, "stopped", 14) is None, "nobody was asked to look yet"
    inquiry.overdue(23)
    inquiry.testify(1, "stopped", 23)
    assert inquiry.verdict is None


def test_a_process_that_runs_is_waited_for_without_end_and_told_of_ever_more_rarely(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    told = []
    for check in range(1, 10_001):
        now = ANSWER * check
        assert inquiry.overdue(now) == [1]
        told += [silent for silent in [inquiry.testify(1, "", now)] if silent is not None]
    assert inquiry.verdict is None
    assert told[:4] == [10, 20, 40, 80] and len(told) == 14


def test_a_process_that_runs_is_waited_for_as_long_as_the_user_wants() -> None:
    inquiry = Inquiry(ANSWER, 60)
    inquiry.ask([1], 0)
    inquiry.overdue(3600)
    inquiry.testify(1, "", 3600)
    assert inquiry.verdict is None, "an hour that nobody lived through"
    for check in range(1, 6):
        assert inquiry.verdict is None
        inquiry.overdue(3600 + ANSWER * check)
        inquiry.testify(1, "", 3600 + ANSWER * check)
    assert inquiry.verdict == (1, UNABLE.format(60))


def test_a_peer_that_nobody_sees_is_lost_in_the_end(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    for check in range(1, UNSEEN_CHECKS):
        inquiry.overdue(ANSWER * check)
    assert inquiry.verdict is None
    inquiry.overdue(ANSWER * UNSEEN_CHECKS)
    assert inquiry.verdict == (1, SILENT)


def test_an_hour_that_nobody_lived_through_counts_once(inquiry: Inquiry) -> None:
    """A job that a scheduler has suspended, or a virtual machine."""
    inquiry.ask([1], 0)
    inquiry.overdue(3600)
    assert inquiry.verdict is None


def test_a_suspicion_is_believed_once_all_have_answered(inquiry: Inquiry) -> None:
    inquiry.suspect(1, "first")
    inquiry.suspect(2, "second")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    assert inquiry.verdict is None
    inquiry.answered(2, 1)
    assert inquiry.verdict == (1, "first")


def test_a_suspicion_does_not_wait_for_a_rank_that_only_cannot_answer_now(inquiry: Inquiry) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    inquiry.overdue(10)
    inquiry.testify(2, "", 10)
    assert inquiry.verdict == (1, "first")


def test_a_suspicion_finds_who_does_not_answer(inquiry: Inquiry) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    inquiry.overdue(10)
    assert inquiry.verdict is None, "somebody else may see it"
    inquiry.overdue(20)
    assert inquiry.verdict == (2, SILENT)


def test_a_suspicion_finds_who_is_stopped(inquiry: Inquiry) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([1, 2], 0)
    inquiry.answered(1, 1)
    for now in (10, 15):
        inquiry.overdue(now)
        assert inquiry.verdict is None
        inquiry.testify(2, "stopped", now)
    assert inquiry.verdict == (2, "stopped")


def test_complaints_of_one_wait_add_up(inquiry: Inquiry) -> None:
    for times in range(1, COMPLAINTS + 1):
        assert inquiry.verdict is None
        complain(inquiry, times, 10 * times, 10 * times + 1)
    assert inquiry.verdict == (1, STUCK.format("stuck"))


def test_complaints_of_several_waits_do_not(inquiry: Inquiry) -> None:
    for number in range(20):
        complain(inquiry, 1 + number % (COMPLAINTS - 1), 10 * number, 10 * number + 1)
    assert inquiry.verdict is None


def test_complaints_of_several_ranks_do_not(inquiry: Inquiry) -> None:
    for accuser in range(2, 20):
        inquiry.complain(accuser, 1, "stuck", 1)
    inquiry.ask([1, 2], 0)
    answer_all(inquiry, [1, 2], 1)
    assert inquiry.verdict is None


@pytest.mark.parametrize("late", [1, 2])
def test_while_anybody_answers_late_nobody_is_to_blame(inquiry: Inquiry, late: int) -> None:
    """It is what the other may wait for; and it needs time to go on itself."""
    for times in range(1, COMPLAINTS):
        complain(inquiry, times, 10 * times, 10 * times + 1)
    inquiry.complain(2, 1, "stuck", COMPLAINTS)
    inquiry.ask([1, 2], 100)
    inquiry.answered(3 - late, 100)
    inquiry.answered(late, 106)
    assert inquiry.verdict is None
    for times in range(COMPLAINTS + 1, 2 * COMPLAINTS):
        complain(inquiry, times, 100 + 10 * times, 100 + 10 * times)
        assert inquiry.verdict is None
    complain(inquiry, 2 * COMPLAINTS, 200, 200)
    assert inquiry.verdict == (1, STUCK.format("stuck"))


def test_complaints_that_have_gathered_count_once(inquiry: Inquiry) -> None:
    """Rank 0 itself could not read them meanwhile."""
    inquiry.ask([1, 2], 0)
    for times in range(1, COMPLAINTS + 1):
        inquiry.complain(2, 1, "stuck", times)
    answer_all(inquiry, [1, 2], 1)
    assert inquiry.verdict is None


def test_where_nobody_is_left_to_ask_complaints_count_at_once(inquiry: Inquiry) -> None:
    for times in range(1, COMPLAINTS + 1):
        complain(inquiry, times, 10 * times, 10 * times, peers=())
    assert inquiry.verdict == (1, STUCK.format("stuck"))


def test_the_first_verdict_stays(inquiry: Inquiry) -> None:
    inquiry.suspect(1, "first")
    inquiry.ask([], 0)
    inquiry.suspect(2, "second")
    inquiry.ask([], 0)
    assert inquiry.verdict == (1, "first")


def test_after_the_end_nothing_is_due(inquiry: Inquiry) -> None:
    inquiry.ask([1], 0)
    inquiry.close()
    assert inquiry.due() is None and inquiry.overdue(100) == []
