"""Rounds that end again and again by the same exception of the script."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from horovod.core.errors import HorovodInternalError, RankLostError, RankRaisedError, RepeatedFailureError
from horovod.elastic.repetition import MOST_REPETITIONS, Repetition


def raised(reason: str = "it raised ValueError: bad (at train.py:3)", rank: int = 1) -> RankRaisedError:
    return RankRaisedError(f"rank {rank} (process 7) failed: {reason}", ranks=[rank], reason=reason)


def test_the_same_exception_in_three_rounds_without_a_step_ends_the_job() -> None:
    repetition = Repetition()
    errors = [repetition.after(raised(rank=rank), 5) for rank in range(MOST_REPETITIONS)]
    assert [type(error) for error in errors] == [RankRaisedError] * (MOST_REPETITIONS - 1) + [RepeatedFailureError]
    assert "3 rounds in a row" in str(errors[-1]) and "train.py:3" in str(errors[-1])
    assert errors[-1].ranks == (2,) and errors[-1].reason == raised().reason


def test_a_completed_step_or_another_exception_begins_the_count_anew() -> None:
    repetition = Repetition()
    for checks in range(10):
        assert type(repetition.after(raised(), checks)) is RankRaisedError
    for number in range(10):
        assert type(repetition.after(raised(f"it raised ValueError: {number}"), 9)) is RankRaisedError


def test_lost_ranks_neither_count_nor_interrupt_the_count() -> None:
    repetition = Repetition()
    lost = RankLostError("killed", reason="it was killed")
    assert all(repetition.after(lost, 0) is lost for _ in range(10))
    found = [repetition.after(error, 0) for error in (raised(), lost, raised(), lost, raised())]
    assert isinstance(found[-1], RepeatedFailureError)


_ROUNDS = some.lists(some.tuples(some.sampled_from(["a", "b", "lost"]), some.booleans()))


@given(_ROUNDS)
def test_the_job_ends_exactly_where_a_run_of_equal_failures_is_long_enough(rounds: list[tuple[str, bool]]) -> None:
    """Beside a plain search of the history: each round is what it ended by, and whether a step was completed in it."""
    repetition, checks, history = Repetition(), 0, []
    for what, step in rounds:
        checks += step
        error: HorovodInternalError = RankLostError(what) if what == "lost" else raised(what)
        ended = isinstance(repetition.after(error, checks), RepeatedFailureError)
        history.append((what, checks))
        failures = [each for each in history if each[0] != "lost"][-MOST_REPETITIONS:]
        assert ended == (what != "lost" and len(failures) == MOST_REPETITIONS and len(set(failures)) == 1)
