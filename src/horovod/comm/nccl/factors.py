"""Which factors NCCL can multiply with, and how others are applied.

NCCL multiplies each element by a factor of the elements' own type. In 16 bits that type holds few numbers: 1e-8 is 0 in
float16, 1e5 is infinite, and 1/3 is 0.2 % off in bfloat16. So NCCL gets a factor only if the type represents it. Otherwise the
device multiplies, in float32, before or after the sum (:class:`Scaling`). If the framework has no kernel for that, the tensor
is staged in host memory.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Any

import numpy as np

_FLOAT32 = np.dtype(np.float32)


@lru_cache(maxsize=1024)
def represents(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a floating type represents the factor well enough for products of the type's precision: exactly in 16 bits, and
    without underflow or overflow in wider types."""
    with np.errstate(all="ignore"):
        held = float(np.array([factor]).astype(dtype).astype(np.float64)[0])
    if dtype.itemsize == 2 or held == factor:
        return held == factor
    return abs(held - factor) <= abs(factor) * float(np.finfo(dtype).eps)


def device_holds(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a kernel of the framework multiplies a type by the factor precisely: it computes 16 bits in 32."""
    return represents(_FLOAT32 if dtype.itemsize == 2 else dtype, factor)


class Scaling(enum.Enum):
    """When the device multiplies, if NCCL does not."""

    NOT = enum.auto()
    BEFORE = enum.auto()
    AFTER = enum.auto()


def scaling(dtype: np.dtype[Any], factor: float) -> Scaling:
    """Before the sum for a factor below 1, so that the sum does not overflow, and after it for one above."""
    if factor == 1.0 or represents(dtype, factor):
        return Scaling.NOT
    return Scaling.BEFORE if abs(factor) < 1.0 else Scaling.AFTER
