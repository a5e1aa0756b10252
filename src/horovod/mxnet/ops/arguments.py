"""Checks the arguments of the operations: ranks, factors, splits and reductions."""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import mxnet as mx
import numpy as np

from horovod.comm.reduction import ReduceOp
from horovod.common.reductions import Adasum, reduction
from horovod.core.process_set import ProcessSet


def whole(value: Any, what: str) -> int:
    """A whole number of Python or NumPy as an int.

    Raises:
        ValueError: ``value`` is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}={value!r}: expected a whole number") from None


def factor(value: Any, what: str) -> float:
    """A number of Python or NumPy as a float.

    Raises:
        ValueError: ``value`` is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what}={value!r}: expected a number") from None


def split_rows(splits: Any) -> list[int] | None:
    """``splits`` of an alltoall as a list. None means an even division.

    Args:
        splits: None, an int32 NDArray, or a sequence of whole numbers.

    Raises:
        ValueError: not one-dimensional, or not of (32-bit) integers.
    """
    if splits is None:
        return None
    if isinstance(splits, mx.nd.NDArray | np.ndarray):
        if splits.ndim != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.ndim} dimensions")
        if isinstance(splits, mx.nd.NDArray):
            if splits.size and np.dtype(splits.dtype) != np.int32:
                raise ValueError(
                    f"alltoall expects splits to contain 32-bit integer elements, not {np.dtype(splits.dtype).name}"
                )
            splits = splits.asnumpy()
    try:
        rows = list(splits)
    except TypeError:
        raise ValueError(f"alltoall expects a 1D splits tensor or a list, not {splits!r}") from None
    return [whole(split, "an entry of splits") for split in rows]


class Reducing(msgspec.Struct, frozen=True):
    """The checked arguments of allreduce and reducescatter.

    Attributes:
        op: the reduction.
        prescale, postscale: the factors before and after the reduction.
        process_set: the ranks that reduce.
        priority: the priority in MXNet's engine.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet
    priority: int

    @classmethod
    def of(
        cls,
        op: Any,
        average: bool | None,
        prescale_factor: Any,
        postscale_factor: Any,
        process_set: ProcessSet,
        priority: Any,
    ) -> Reducing:
        """Check the arguments that the user passed.

        Raises:
            ValueError: ``op`` and ``average`` are both given, or an argument is wrong.
            AssertionError: ``op`` is Adasum, which this binding does not support.
        """
        chosen = reduction(op, average)
        if chosen == Adasum:
            raise AssertionError("op=hvd.Adasum is not supported by horovod.mxnet; use hvd.Average or hvd.Sum")
        return cls(
            chosen,
            factor(prescale_factor, "prescale_factor"),
            factor(postscale_factor, "postscale_factor"),
            process_set,
            whole(priority, "priority"),
        )
