"""Random sequences of what scripts do to gradients that are not reduced yet, on real ranks, against one process.

A sequence trains as in one process, unless the script changes a gradient of this rank alone before its reduction. Such a
sequence is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs import make_job
from loops.harness import Loop, objection
from loops.pytorch import both_sides
from loops.pytorch_sequences import (
    PARAMETERS,
    Action,
    Backward,
    Change,
    Discard,
    Look,
    Step,
    Zero,
    must_be_refused,
    trained,
)
from part import draws
from ranks import RankPool

RANKS = 2
CHANGED = r"AssertionError: The gradient of '\S+' was changed before its reduction"

some = st.lists(st.integers(0, PARAMETERS - 1), min_size=1, max_size=PARAMETERS, unique=True).map(sorted).map(tuple)
backward = st.builds(Backward, some, st.sampled_from(["taken", "copied", "added"]), st.booleans())


def actions(total: bool) -> st.SearchStrategy[Action]:
    """Actions of a sequence. Sums are only changed in place, because a replaced sum is refused for another reason."""
    changes = ["in place"] if total else ["in place", "replaced", "replaced twice"]
    return st.one_of(
        backward,
        backward,
        st.builds(Look, some),
        st.builds(Discard, some),
        st.builds(Change, some, st.sampled_from(changes)),
        st.builds(Zero, st.booleans()),
        st.just(Step()),
    )


LOCAL = Backward((0, 1), "copied", True)


@settings(max_examples=draws(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    cases=st.booleans().flatmap(
        lambda total: st.tuples(st.lists(actions(total), min_size=1, max_size=9), st.just(total))
    ),
    window=st.sampled_from([1, 1, 2]),
)
@example(([LOCAL, Discard((0,)), LOCAL], False), 1)
@example(([LOCAL, Discard((0,)), Backward((0,), "copied", False)], False), 1)
@example(([Backward((0,), "taken", True), Change((0,), "replaced twice"), Backward((0,), "taken", True)], False), 1)
@example(([Backward((0, 1), "taken", False), Look((0, 1))], True), 1)
def test_local_gradients_train_as_in_one_process_or_are_refused(
    ranks: Callable[..., RankPool], cases: tuple[list[Action], bool], window: int
) -> None:
    sequence, total = cases
    job = make_job(lambda size: ranks(size, framework="torch"), "horovod.torch")
    outcomes = job(RANKS, both_sides, trained(sequence, window, total))
    refused = CHANGED if must_be_refused(sequence, window) else ""
    ranked = [replace(each, warned=()) for _, each in outcomes]  # a hint says that zeros are set by hand
    loop: Loop[Any] = Loop("random sequence", trained(sequence, window, total), refused)
    assert not (text := objection(loop, outcomes[0][0], ranked)), text
