"""PyTorch's arithmetic for 16-bit floats leaves what float32 arithmetic and one rounding would, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import horovod.torch  # noqa: F401  brings PyTorch's arithmetic
from horovod.comm import reduction
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into

TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
EVERY = np.arange(1 << 16, dtype=np.uint16)
OTHERS = 24


def expected(first: Array, second: Array, factor: float) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return ((first.astype(np.float32) + second.astype(np.float32)) * np.float32(factor)).astype(first.dtype)


def same(result: Array, wanted: Array) -> bool:
    nans = np.isnan(result.astype(np.float32))
    return bool(
        np.array_equal(nans, np.isnan(wanted.astype(np.float32)))
        and np.array_equal(result.view(np.uint16)[~nans], wanted.view(np.uint16)[~nans])
    )


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_and_means_of_sixteen_bit_floats_are_rounded_once(dtype: np.dtype, factor: float) -> None:
    """Subnormal numbers, zeros of both signs, what overflows, infinities and NaNs among them."""
    generator = np.random.default_rng(5)
    special = np.array([0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7BFF, 0xFF7F, 0x7F7F], np.uint16)
    numbers = EVERY.view(dtype)
    workspace = Workspace()
    for bits in [*special, *generator.integers(1 << 16, size=OTHERS - len(special)).astype(np.uint16)]:
        other = np.full(len(EVERY), bits, np.uint16).view(dtype)
        result = np.empty(len(EVERY), dtype)
        with np.errstate(all="ignore"):
            reduce_into(result, [numbers, other], ReduceOp.SUM, 1.0, factor, workspace)
        assert same(result, expected(numbers, other, factor)), hex(bits)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_finite_means_are_computed_by_pytorch(dtype: np.dtype) -> None:
    """By itself, so that nothing makes up for what it gets wrong; it gives up where something is not finite."""
    finite = EVERY[np.isfinite(EVERY.view(dtype).astype(np.float32))].view(dtype)
    generator = np.random.default_rng(6)
    for _ in range(OTHERS):
        first, second = generator.permutation(finite), generator.permutation(finite)
        wanted = expected(first, second, 0.5)
        # Where the sum of two overflows float32, their mean need not.
        usual = np.maximum(*(np.abs(each.astype(np.float32)) for each in (first, second))) < 1.6e38
        first, second, wanted = first[usual], second[usual], wanted[usual]
        result = np.empty_like(first)
        done = reduction._mean(first, second, result)
        assert done == bool(np.isfinite(result.astype(np.float32)).all())
        if dtype == np.float16:
            assert done
        sound = np.isfinite(result.astype(np.float32))
        assert np.array_equal(result.view(np.uint16)[sound], wanted.view(np.uint16)[sound])
    for infinite in (np.inf, -np.inf, np.nan):
        for index in (0, 1):
            pair = [np.ones(70, dtype), np.ones(70, dtype)]
            pair[index][69] = infinite
            assert not reduction._mean(*pair, np.empty(70, dtype))
