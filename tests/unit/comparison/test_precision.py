"""Elements of parameters: bit for bit until a rank has made a step, then with a tolerance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import Array
from horovod.comparison.alike import Alike, decode, describe_differences, encode
from horovod.comparison.precision import Elements, differ

KINDS = ["float64", "float32"]


def held(values: Array, kind: str, exact: bool) -> Elements:
    found = decode(encode({"weight": Elements(kind, tuple(values.tolist()), exact)}))[
        "weight"
    ]  # as another rank gets it
    assert isinstance(found, Elements)
    return found


@given(
    st.integers(0, 10**6),
    st.integers(0, 9),
    st.floats(-60, 60),
    st.sampled_from(KINDS),
    st.lists(st.booleans(), min_size=2, max_size=4),
)
def test_rounding_differs_only_where_no_rank_has_stepped(
    seed: int, count: int, magnitude: float, kind: str, exact: list[bool]
) -> None:
    draw = np.random.default_rng(seed)
    values = (draw.standard_normal(count) * 2.0**magnitude).astype(kind)
    rows = [(values * (1 + 9 * np.finfo(kind).eps * draw.standard_normal(count))).astype(kind) for _ in exact]
    found = [held(row, kind, each) for row, each in zip(rows, exact, strict=True)]
    same = all(np.array_equal(one, two) for one, two in itertools.pairwise(rows))
    assert differ(found) == (all(exact) and not same)
    text = describe_differences(Alike.PARAMETERS, {rank: {"weight": each} for rank, each in enumerate(found)})
    assert bool(text) == differ(found)


@given(
    st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(["scaled", "one", "nan", "inf", "count"]), st.booleans()
)
def test_other_values_differ(seed: int, count: int, how: str, exact: bool) -> None:
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(count)
    other = values.copy()
    if how == "scaled":
        other *= 1.01
    elif how == "count":
        other = other[1:]
    else:
        other[draw.integers(count)] += {"one": 0.1, "nan": math.nan, "inf": math.inf}[how]
    assert differ([held(values, "float32", exact), held(other, "float32", True)])


@pytest.mark.parametrize("exact", [False, True])
def test_nan_and_infinity_on_all_ranks_are_no_difference(exact: bool) -> None:
    values = np.array([math.nan, math.inf, -math.inf, 1.0])
    assert not differ([held(values, "float32", exact), held(values.copy(), "float32", True)])
    assert differ(
        [held(values, "float32", exact), held(np.array([math.nan, math.inf, -math.inf, 1.1]), "float32", True)]
    )


def test_text_and_missing_values_differ_unless_they_are_the_same() -> None:
    one = held(np.ones(2), "float32", True)
    assert differ([one, None]) and differ(["1", "2"]) and differ([one, "[1.0, 1.0]"])
    assert not differ(["1", "1"]) and not differ([one, one])
    assert differ([one, held(np.ones(2), "float64", True)])
