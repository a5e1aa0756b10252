"""Checks of the operations' arguments: ranks, factors, splits and reductions."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from horovod._bindings import reductions
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.submission.arguments import real_number, set_id, whole_number


def whole(value: Any, what: str) -> int:
    """A whole number of Python, NumPy or MXNet, as an int.

    Raises:
        ValueError: ``value`` is not a whole number.
    """
    try:
        return whole_number(value, what)
    except TypeError as error:
        raise ValueError(str(error)) from None  # of_both_kinds() converts ValueErrors, but not TypeErrors


def factor(value: Any, what: str) -> float:
    """A number of Python, NumPy or MXNet, as a float.

    Raises:
        ValueError: ``value`` is not a finite number.
    """
    try:
        return real_number(value, what)
    except TypeError as error:
        raise ValueError(str(error)) from None  # as above


def split_rows(splits: Any) -> list[int] | None:
    """``splits`` of an alltoall as a list. None means an even division.

    Args:
        splits: None, an int32 NDArray, or a sequence of whole numbers.

    Raises:
        ValueError: ``splits`` is not one-dimensional, an NDArray of another type, or has entries that are not whole numbers.
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


class MXNetReductionArguments(reductions.ReductionArguments, frozen=True):
    """The checked arguments of allreduce and reducescatter.

    Attributes:
        priority: the priority in MXNet's engine.
    """

    priority: int = 0


def reducing(
    op: Any,
    average: bool | None,
    prescale_factor: Any,
    postscale_factor: Any,
    process_set: ProcessSet,
    priority: Any,
) -> MXNetReductionArguments:
    """Check the arguments that the user passed.

    Raises:
        ValueError: ``op`` and ``average`` are both given, or an argument is wrong.
        TypeError: ``average`` is not a flag, or ``process_set`` is not a process set.
        AssertionError: ``op`` is Adasum, which this binding does not support.
    """
    set_id(process_set)
    chosen = reductions.reduction(op, average)
    if chosen == reductions.Adasum:
        raise AssertionError("op=hvd.Adasum is not supported by horovod.mxnet; use hvd.Average or hvd.Sum")
    prescale, postscale = factor(prescale_factor, "prescale_factor"), factor(postscale_factor, "postscale_factor")
    return MXNetReductionArguments(chosen, prescale, postscale, process_set, None, whole(priority, "priority"))
