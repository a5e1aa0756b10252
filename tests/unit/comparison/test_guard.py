"""What is compared between ranks: numbers of optimizers, and the first elements of some parameters."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison.guard import ELEMENTS, beginnings, compared_parameters, labels, numbers
from horovod.comparison.precision import differ


def test_numbers_flags_and_missing_values_are_compared() -> None:
    found = numbers(
        {"momentum": 0.9, "nesterov": True, "clipnorm": None, "name": "sgd", "schedule": object(), "steps": 3}
    )
    assert found == {"momentum": "0.9", "nesterov": "True", "clipnorm": "None", "steps": "3"}


@given(st.integers(0, 1000))
def test_some_parameters_are_from_all_parts_of_the_model(count: int) -> None:
    chosen = compared_parameters(range(count))
    assert len(chosen) <= 64 and (count == 0 or chosen[0] == 0)
    assert all(after - before <= count // 64 + 1 for before, after in itertools.pairwise(chosen))
    assert count > 64 or chosen == list(range(count))


def test_the_first_elements_are_compared_as_rounded_by_a_step() -> None:
    one, two = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4)
    assert beginnings([one, np.zeros(0)]) == beginnings([two, np.zeros(0)])
    two[0, ELEMENTS - 1] += 0.01
    changed = beginnings([two])["parameter 0"]
    assert changed != beginnings([one])["parameter 0"] and str(changed) == "[0.0, 1.0, 2.0, 3.01]"
    assert differ([changed, beginnings([one])["parameter 0"]])
    assert list(beginnings([one, two])) == labels(2)
