"""Which factors NCCL multiplies with, and what comes of all others, in every floating type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.nccl.factors import Scaling, device_holds, represents, scaling

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
WIDE = [np.dtype(np.float32), np.dtype(np.float64)]
FACTORS = st.floats(allow_nan=False, allow_infinity=False)


@given(FACTORS, st.sampled_from(HALVES + WIDE), st.floats(0.5, 1.0))
def test_a_factor_that_a_type_holds_gives_products_of_the_types_precision(factor: float, dtype: Any, x: float) -> None:
    """Computed as NCCL does, in the type itself, and exactly."""
    if not represents(dtype, factor):
        return
    element = np.array([x]).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        found = (
            (element.astype(wide) * np.array([factor]).astype(dtype).astype(wide)).astype(dtype).astype(np.float64)[0]
        )
    exact = float(element.astype(np.float64)[0]) * factor
    info: Any = ml_dtypes.finfo(dtype)
    assert abs(found - exact) <= 4 * float(info.eps) * abs(exact) + float(info.smallest_subnormal)


@pytest.mark.parametrize("dtype", HALVES)
def test_factors_that_become_another_number_in_16_bits_are_not_held(dtype: Any) -> None:
    assert not any(represents(dtype, factor) for factor in (1e-8, 1e5, 1e40, 1 / 3, 1 / 6, 0.1))
    assert all(represents(dtype, factor) for factor in (1 / 8, 0.25, 2.0, 0.0, -1.0, 1.5))


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_types_hold_what_is_neither_subnormal_nor_infinite_there(dtype: Any) -> None:
    assert represents(dtype, 1 / 3) and represents(dtype, 1e-30) and represents(dtype, -1e30)
    assert [represents(dtype, factor) for factor in (1e-40, 1e39)] == [dtype == np.float64] * 2


@given(FACTORS)
def test_a_device_multiplies_16_bits_by_whatever_float32_holds(factor: float) -> None:
    for dtype in HALVES:
        assert device_holds(dtype, factor) == represents(WIDE[0], factor)
        how = scaling(dtype, factor)
        assert (how is Scaling.NOT) == (factor == 1.0 or represents(dtype, factor))
        if how is not Scaling.NOT:
            assert (how is Scaling.BEFORE) == (abs(factor) < 1.0)
