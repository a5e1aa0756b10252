"""Which factors NCCL can multiply by, and when the device applies the others.

NCCL multiplies each element by a factor of the elements' own type. A 16-bit type represents few numbers: 1e-8 is 0 in
float16, 1e5 is infinite, and 1/3 is 0.2 % off in bfloat16. So NCCL gets a factor only if the type represents it. Otherwise a
kernel of the framework multiplies, 16-bit types in float32, before or after the sum (:class:`Scaling`). If the framework has no
kernel for that, the tensor is staged in host memory.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Any

import numpy as np

_FLOAT32 = np.dtype(np.float32)


@lru_cache(maxsize=1024)
def represents(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a floating type represents the factor well enough for products of the type's precision: exactly in 16-bit types,
    and without underflow or overflow in wider types."""
    with np.errstate(all="ignore"):
        held = float(np.array([factor]).astype(dtype).astype(np.float64)[0])
    if dtype.itemsize == 2 or held == factor:
        return held == factor
    return abs(held - factor) <= abs(factor) * float(np.finfo(dtype).eps)


def device_holds(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a kernel of the framework multiplies this type by the factor precisely: it computes 16-bit types in float32."""
    return represents(_FLOAT32 if dtype.itemsize == 2 else dtype, factor)


class Scaling(enum.Enum):
    """When a kernel of the framework multiplies: not at all (NCCL does, or the factor is 1), or before or after the sum."""

    NOT = enum.auto()
    BEFORE = enum.auto()
    AFTER = enum.auto()


def scaling(dtype: np.dtype[Any], factor: float) -> Scaling:
    """When to multiply by ``factor``: not at all if it is 1 or NCCL can; otherwise before the sum if it is below 1, so that
    the sum does not overflow, and after the sum if it is above 1."""
    if factor == 1.0 or represents(dtype, factor):
        return Scaling.NOT
    return Scaling.BEFORE if abs(factor) < 1.0 else Scaling.AFTER
