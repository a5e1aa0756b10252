"""Which factors NCCL can multiply with, and what has to be done with others.

NCCL multiplies each element by a factor of the elements' own type. In 16 bits that type holds few numbers: 1e-8 is 0 in
float16, 1e5 is infinite, and 1/3 is 0.2 % off in bfloat16. So a factor goes to NCCL only where the type holds it. Otherwise the
device multiplies, in float32, before or after the sum (:class:`Scaling`); where the framework has no kernel for that, host
memory serves.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Any

import numpy as np

_FLOAT32 = np.dtype(np.float32)


@lru_cache(maxsize=1024)
def holds(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a floating type has a number so near to the factor that products have the type's precision: exactly the factor in
    16 bits, and no subnormal number or infinity in more."""
    with np.errstate(all="ignore"):
        held = float(np.array([factor]).astype(dtype).astype(np.float64)[0])
    if dtype.itemsize == 2 or held == factor:
        return held == factor
    return abs(held - factor) <= abs(factor) * float(np.finfo(dtype).eps)


def device_holds(dtype: np.dtype[Any], factor: float) -> bool:
    """Whether a kernel of the framework multiplies a type by the factor precisely: it computes 16 bits in 32."""
    return holds(_FLOAT32 if dtype.itemsize == 2 else dtype, factor)


class Scaling(enum.Enum):
    """When the device multiplies, where NCCL does not."""

    NOT = enum.auto()
    BEFORE = enum.auto()
    AFTER = enum.auto()


def scaling(dtype: np.dtype[Any], factor: float) -> Scaling:
    """Before the sum for a factor below 1, so that the sum does not overflow, and after it for one above."""
    if factor == 1.0 or holds(dtype, factor):
        return Scaling.NOT
    return Scaling.BEFORE if abs(factor) < 1.0 else Scaling.AFTER
