"""The arguments of a reduction are checked as if each call were the first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod._bindings import reductions
from horovod._bindings.reductions import Average, Max, Sum, checked_reduction
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set

SETS = [global_process_set, ProcessSet([0]), "not a set"]
FACTORS = [1.0, 0.5, 1, True, "1.0", float("nan"), np.float32(2), None]


def outcome(arguments: tuple[Any, ...]) -> object:
    try:
        return checked_reduction(*arguments)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore")
@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, Sum, Average, Max, 1, "Sum"]),
            st.sampled_from([None, None, None, True, False]),
            st.sampled_from(FACTORS),
            st.sampled_from(FACTORS),
            st.sampled_from(SETS),
        ),
        max_size=20,
    )
)
def test_what_was_checked_before_does_not_matter(calls: list[tuple[Any, ...]]) -> None:
    for arguments in calls:
        after_others = outcome(arguments)
        again = outcome(arguments)
        reductions._last = (object(),) * 4 + (reductions.ReductionArguments(),)
        assert after_others == again == outcome(arguments)


def test_a_factor_that_the_script_has_changed_is_read_again() -> None:
    factor = np.array(2.0)
    first = checked_reduction(Sum, None, factor, 1.0, global_process_set)
    factor[...] = 3.0
    second = checked_reduction(Sum, None, factor, 1.0, global_process_set)
    assert (first.prescale, second.prescale) == (2.0, 3.0)
