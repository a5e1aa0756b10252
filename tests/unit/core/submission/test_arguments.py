"""What a script passes becomes a plain value, or an error that names the argument."""

from __future__ import annotations

import enum
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import encode
from horovod.core.submission.arguments import (
    LONGEST_NAME,
    flag_value,
    full_name,
    loose_truth,
    real_number,
    set_id,
    whole_number,
    whole_numbers,
)


class Whole(int):
    pass


class Word(str, enum.Enum):
    ONE = "one"


class Level(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize("value", [2, np.int8(2), np.uint64(2), np.array(2), Whole(2), Level.TWO])
def test_whole_numbers(value: Any) -> None:
    assert whole_number(value, "root_rank") == 2 and type(whole_number(value, "root_rank")) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, np.float64(2), np.array([2]), "2", b"2", None, [2], 2j])
def test_other_values_than_whole_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^root_rank=.*: expected a whole number, not "):
        whole_number(value, "root_rank")


@given(st.integers())
def test_whole_numbers_fit_into_a_message(value: int) -> None:
    if -(2**63) <= value < 2**63:
        assert whole_number(value, "x") == value
        encode(value)
    else:
        with pytest.raises(ValueError, match="more than 64 bits"):
            whole_number(value, "x")


@pytest.mark.parametrize(
    "value", [0.5, np.float16(0.5), np.float64(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2)]
)
def test_numbers(value: Any) -> None:
    assert real_number(value, "x") == 0.5 and type(real_number(value, "x")) is float


@pytest.mark.parametrize(
    "value", [True, np.bool_(False), "0.5", b"1", None, [0.5], np.array([0.5]), 1j, np.complex64(1)]
)
def test_other_values_than_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^x=.*: expected a number, not "):
        real_number(value, "x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, np.float32("nan"), Decimal("inf"), 10**400])
def test_numbers_without_an_end(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^x=.* is (not finite|too large)"):
        real_number(value, "x")


def test_several_whole_numbers() -> None:
    for values in ([1, 2], (np.int32(1), 2), np.array([1, 2]), range(1, 3), iter([1, 2])):
        assert whole_numbers(values, "splits") == [1, 2]
    for wrong in (3, "12", b"12", None, np.array(3), [1, "2"], [[1]], np.ones((2, 2))):
        with pytest.raises(TypeError, match=r"^splits"):
            whole_numbers(wrong, "splits")
    with pytest.raises(TypeError, match=r"^splits\[1\]=2.5: expected a whole number, not float"):
        whole_numbers([1, 2.5], "splits")


def test_flags() -> None:
    assert flag_value(True, "x") is flag_value(np.bool_(True), "x") is flag_value(1, "x") is True
    assert flag_value(False, "x") is flag_value(np.array(False), "x") is flag_value(0, "x") is False
    for wrong in ("", "yes", None, 2, 0.5, [True], np.array([True, False])):
        with pytest.raises((TypeError, ValueError), match=r"^average="):
            flag_value(wrong, "average")


def test_flags_that_take_anything() -> None:
    for value in ("loss", 2, [0], np.bool_(True), np.array([True]), object()):
        assert loose_truth(value, "average") is True
    for value in ("", 0, [], np.bool_(False), np.array(0), None):
        assert loose_truth(value, "average") is False
    with pytest.raises(TypeError, match=r"^average=.*expected True or False"):
        loose_truth(np.array([True, False]), "average")


def test_names() -> None:
    assert full_name("allreduce", "x") == "allreduce.x"
    assert full_name("allreduce", None) == full_name("allreduce", "") == ""
    assert full_name("allreduce", Word.ONE) == "allreduce.one"
    assert type(full_name("allreduce", np.str_("x"))) is str
    for number in (5, np.int64(5), np.array(5)):
        assert full_name("allreduce", number) == "allreduce.5"
    assert full_name("allreduce", 0) == "allreduce.0"
    for wrong in (5.0, b"x", ["x"], np.array("x"), False):
        with pytest.raises(TypeError, match=r"^name=.*is a string, not "):
            full_name("allreduce", wrong)
    with pytest.raises(ValueError, match="valid Unicode"):
        full_name("allreduce", "a\udc80")
    full_name("allreduce", "ü" * (LONGEST_NAME // 2))
    with pytest.raises(ValueError, match=f"has {LONGEST_NAME + 2} bytes") as error:
        full_name("allreduce", "ü" * (LONGEST_NAME // 2 + 1))
    assert len(str(error.value)) < 300


@given(st.text(st.characters(exclude_categories=[]), max_size=20))
def test_a_name_that_is_taken_can_be_sent(name: str) -> None:
    try:
        taken = full_name("allreduce", name)
    except ValueError as error:
        encode(str(error))
    else:
        encode(taken)


def test_process_sets() -> None:
    assert set_id(global_process_set) == 0 and set_id(ProcessSet([0])) is None
    for wrong in (None, 0, [0, 1], "world", ProcessSet):
        with pytest.raises(TypeError, match=r"^process_set=.*expected a hvd\.ProcessSet"):
            set_id(wrong)
