"""What arguments mean, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from horovod.mxnet.ops.arguments import factor, reducing, split_rows, whole


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_whole_numbers_of_any_kind_become_ints(value: Any) -> None:
    assert whole(value, "x") == 3 and type(whole(value, "x")) is int


@pytest.mark.parametrize("value", [3.0, np.float32(3), "3", None, mx.nd.ones((2,))])
def test_values_that_are_not_whole_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)root_rank=.*: expected a whole number"):
        whole(value, "root_rank")


def test_factors_of_any_kind_become_floats_and_others_are_refused() -> None:
    for value in (2, 2.0, np.float16(2), np.int64(2), np.array(2.0)):
        assert factor(value, "x") == 2.0 and type(factor(value, "x")) is float
    for wrong in ("half", None, [1, 2]):
        with pytest.raises(ValueError, match=r"prescale_factor=.*: expected a number"):
            factor(wrong, "prescale_factor")


def test_splits_of_any_kind_become_a_list_and_others_are_refused() -> None:
    assert split_rows(None) is None
    for given in ([1, 2], (1, 2), np.array([1, 2]), mx.nd.array([1, 2], dtype="int32"), [np.int8(1), np.uint16(2)]):
        assert split_rows(given) == [1, 2]
    assert split_rows([]) == [] == split_rows(np.array([], np.int32))
    for wrong, text in {
        "numbers": (mx.nd.array([1, 2], dtype="int64"), "32-bit integer elements, not int64"),
        "dimensions": (np.ones((2, 2), np.int32), "1D splits tensor, not one of 2 dimensions"),
        "fractions": ([0.5], "expected a whole number"),
        "no list": (5, "1D splits tensor or a list"),
    }.values():
        with pytest.raises(ValueError, match=text):
            split_rows(wrong)


def test_arguments_of_a_reduction_are_checked() -> None:
    how = reducing(None, None, np.float32(0.5), 2, hvd.global_process_set, np.int64(-3))
    assert (how.op, how.prescale, how.postscale, how.priority) == (hvd.Average, 0.5, 2.0, -3)
    with pytest.raises(AssertionError, match="Adasum is not supported"):
        reducing(hvd.Adasum, None, 1.0, 1.0, hvd.global_process_set, 0)
    with pytest.raises(ValueError, match="is not a reduction"):
        reducing("mean", None, 1.0, 1.0, hvd.global_process_set, 0)
