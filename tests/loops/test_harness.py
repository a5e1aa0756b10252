"""The harness itself: it finds what is wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

from loops.harness import Loop, Outcome, Side, objection, outcome


def done(*values: float, warned: tuple[str, ...] = ()) -> Outcome:
    return Outcome(np.array(values), warned=warned)


REFUSED = Outcome(None, "AssertionError: the gradient of 'a' was changed", "trace")
LEFT = Outcome(None, "HorovodInternalError: rank 0 has left the job", "trace")
RIGHT = Loop("right", lambda side: ())
REFUSING = Loop("refusing", lambda side: (), refused="'a' was changed")
WARNING = Loop("warning", lambda side: (), warns="rates differ")
APART = Loop("apart", lambda side: (), told="gradients differ")
ERRORS = APART.under("error")
TOLD = Outcome(None, "MismatchError: the gradients differ", "trace")


@pytest.mark.parametrize(
    ("loop", "ranks", "text"),
    [
        (RIGHT, [done(1.0), done(1.0)], ""),
        (RIGHT, [done(1.0 + 1e-6), done(1.0 + 1e-6)], "silently wrong"),
        (RIGHT, [done(float("nan")), done(float("nan"))], "silently wrong"),
        (RIGHT, [done(1.0), done(1.0 + 1e-12)], "ranks 0 and 1 differ"),
        (RIGHT, [done(1.0, 2.0), done(1.0, 2.0)], "has \\(2,\\) values"),
        (RIGHT, [REFUSED, LEFT], "was refused"),
        (RIGHT, [done(1.0, warned=("careful",)), done(1.0)], "warned without cause"),
        (RIGHT, [done(1.0, warned=("known",)), done(1.0)], ""),
        (REFUSING, [REFUSED, REFUSED], ""),
        (REFUSING, [LEFT, REFUSED], ""),
        (REFUSING, [LEFT, LEFT], "was not refused on every rank"),
        (REFUSING, [REFUSED, done(1.0)], "was not refused on every rank"),
        (REFUSING, [done(1.0), done(1.0)], "was not refused; it was right"),
        (REFUSING, [done(2.0), done(2.0)], "was not refused; silently wrong"),
        (REFUSING, [REFUSED, Outcome(None, "TypeError: None", "")], "was not refused on every rank"),
        (WARNING, [done(1.0, warned=("the rates differ",)), done(1.0)], ""),
        (WARNING, [done(1.0), done(1.0)], "no warning matches"),
        (APART, [done(2.0, warned=("the gradients differ",)), done(3.0)], ""),
        (APART, [done(2.0), done(3.0)], "no warning matches"),
        (APART, [TOLD, TOLD], "was refused"),
        (ERRORS, [TOLD, TOLD], ""),
        (ERRORS, [done(2.0, warned=("the gradients differ",)), done(3.0)], "was not refused"),
    ],
)
def test_what_is_wrong_is_found(loop: Loop[Side], ranks: list[Outcome], text: str) -> None:
    found = objection(loop, done(1.0, warned=("known",)), ranks)
    if text:
        assert re.search(text, found)
    else:
        assert not found


def test_a_loop_that_does_not_run_in_one_process_is_no_loop() -> None:
    assert "broken in one process" in objection(REFUSING, REFUSED, [REFUSED])


def test_a_side_has_its_rows() -> None:
    rows = list(range(6))
    assert [Side(rank, 3, True).share(rows) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert Side(0, 3, False).share(rows) == rows
    assert Side(0, 3, False).parts(rows) == [[0, 1], [2, 3], [4, 5]] and Side(1, 3, True).parts(rows) == [[2, 3]]


def test_a_rank_that_raises_leaves_the_job() -> None:
    left = []
    found = outcome(lambda side: 1 / 0, Side(0, 2, True), end=lambda: left.append(True))  # type: ignore[arg-type, return-value]
    assert found.error == "ZeroDivisionError: division by zero" and left and "1 / 0" in found.trace
