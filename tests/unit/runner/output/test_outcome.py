"""The launcher's last words and its exit status."""

from __future__ import annotations

import signal

import pytest

from horovod.runner.agent.messages import Exit
from horovod.runner.output.outcome import Outcome


def test_a_job_that_went_well_has_no_last_words() -> None:
    outcome = Outcome({0: Exit(0)})
    assert (outcome.describe(), outcome.status, outcome.failed) == ("", 0, False)


def test_a_failed_job_reports_rank_host_reason_and_exit_code() -> None:
    outcome = Outcome(
        culprit=1,
        exit=Exit(139, signal.SIGSEGV),
        location="localhost, local rank 1",
        reason="rank 1 left",
        tail=["boom"],
    )
    assert outcome.describe().splitlines() == [
        "horovodrun: the end of rank 1's stderr:",
        "    boom",
        "horovodrun: the job failed. Rank 1 failed first (localhost, local rank 1).",
        "Reason: rank 1 left",
        "Process name: 1",
        "Exit code: 139 (killed by SIGSEGV)",
    ]
    assert outcome.status == 139


def test_the_end_of_stderr_is_not_shown_where_it_repeats_the_reason() -> None:
    reason = "MismatchError: Mismatched shapes: as each rank submitted it:\n  rank 0: [64]\n  rank 1: [100]"
    tail = [
        "Traceback (most recent call last):",
        "horovod.core.errors.MismatchError: Mism",
        "  rank 0: [64]",
        "  rank 1: [100]",
    ]
    for after in ([], ["a line of an exit function"]):
        outcome = Outcome(culprit=1, exit=Exit(1), location="localhost", reason=reason, tail=[*tail, *after])
        shown = outcome.describe()
        assert shown.count("rank 1: [100]") == 1 and "the end of rank 1's stderr" not in shown
        below = outcome.describe(below_output=True)
        assert below == shown.replace(reason, "MismatchError, as printed above")


@pytest.mark.parametrize("last", ["bdb.BdbQuit", "EOFError: EOF when reading a line"])
def test_a_debugger_that_had_nothing_to_read_gets_advice(last: str) -> None:
    advice = "Rank 1 does not read standard input. To debug or answer it, start the job with horovodrun --stdin 1"
    assert Outcome(culprit=1, exit=Exit(1), tail=["Traceback", last]).describe().endswith(advice)
    assert advice not in Outcome(culprit=1, exit=Exit(1), tail=["Traceback", last], reader=1).describe()
    assert advice not in Outcome(culprit=1, exit=Exit(1), tail=[last, "ValueError"]).describe()


def test_a_signal_beats_what_it_did_to_the_ranks() -> None:
    outcome = Outcome(culprit=1, exit=Exit(3), interrupted=signal.SIGINT)
    assert (outcome.status, outcome.describe()) == (130, "horovodrun: ended by SIGINT")


def test_memory_is_suspected_of_a_sigkill() -> None:
    assert "memory" in Outcome(culprit=0, exit=Exit(137, signal.SIGKILL)).describe()


def test_an_unknown_signal_has_a_number() -> None:
    assert str(Exit(128 + 40, 40)) == "168 (killed by signal 40)"


def test_processes_that_survive_sigkill_are_named() -> None:
    assert "processes 7, 9 did not end" in Outcome(immortal=frozenset({9, 7})).describe()


def test_a_culprit_that_hangs_has_its_victims_exit_code() -> None:
    words = Outcome(culprit=1, victim=0, exit=Exit(3), location="here").describe()
    assert "Process name: 1\nExit code: 3, which is that of rank 0" in words


def test_a_rank_that_is_lost_with_its_host_says_so_rather_than_what_others_saw_of_it() -> None:
    lost = Exit(255, reason="the agent of b is lost")
    outcome = Outcome(culprit=2, exit=lost, location="b, local rank 0", reason="its connections closed", unheard=["b"])
    assert outcome.describe().splitlines() == [
        "horovodrun: b did not confirm that the job has ended there; the agent there ends the remaining processes by itself, "
        "within 20 seconds",
        "horovodrun: the job failed. Rank 2 failed first (b, local rank 0).",
        "Reason: the agent of b is lost",
        "Process name: 2",
        "Exit code: 255",
    ]
