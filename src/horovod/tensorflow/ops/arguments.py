"""Checks the arguments of the operations when they are called, also while a graph is being built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from horovod._bindings import reductions
from horovod._bindings.reductions import ReductionArguments
from horovod._bindings.scalars import whole
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.submission.arguments import set_id, shown, whole_numbers
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import InvalidArgument, of_both_kinds

_LARGEST_SPLIT = np.iinfo(np.int32).max


def root(value: Any, process_set: ProcessSet) -> int:
    """Check a root rank, and return it as an int.

    Raises:
        TypeError: ``value`` is not a whole number, or ``process_set`` is not a process set.
        InvalidArgument: the rank is not a member of the process set.
    """
    set_id(process_set)
    number = whole(value, "root_rank")
    if not tf.executing_eagerly() and process_set.ranks and number not in process_set.ranks:
        raise InvalidArgument(
            f"broadcast received invalid root rank {number} for provided process set: it has ranks {process_set.ranks}"
        )
    return number


def checked_reduction(
    op: Any, average: bool | None, prescale_factor: Any, postscale_factor: Any, process_set: ProcessSet
) -> ReductionArguments:
    """As :func:`horovod._bindings.reductions.checked_reduction`, with InvalidArgument for ValueError."""
    with of_both_kinds():
        return reductions.checked_reduction(op, average, prescale_factor, postscale_factor, process_set)


def compressor(compression: Any) -> type[Compressor]:
    """Check a compressor. None means ``Compression.none``. Raises TypeError if it lacks ``compress`` or ``decompress``."""
    if compression is None:
        return Compression.none
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise TypeError(
            f"compression={shown(compression)}: expected one of hvd.Compression, such as hvd.Compression.fp16"
        )
    chosen: type[Compressor] = compression
    return chosen


def splits(given: Any, tensor: Any, process_set: ProcessSet) -> Any:
    """Check the splits of an alltoall, and return them as an int32 tensor.

    Raises:
        InvalidArgument: the splits have another type or shape, or their values are known and do not fit the tensor.
    """
    try:
        chosen = tf.convert_to_tensor(given)
    except (TypeError, ValueError):
        raise InvalidArgument(f"splits={shown(given)}: expected a list of whole numbers") from None
    if not chosen.dtype.is_integer or (tf.is_tensor(given) and chosen.dtype != tf.int32):
        raise InvalidArgument(f"alltoall expects splits to contain 32-bit integer elements, not {chosen.dtype.name}")
    if chosen.shape.rank not in (None, 1):
        raise InvalidArgument(f"alltoall expects a 1D splits tensor, not one of {chosen.shape.rank} dimensions")
    known = tf.get_static_value(chosen)
    if known is not None:
        _check_splits(whole_numbers(known, "splits"), tensor, process_set)
    return tf.cast(chosen, tf.int32)


def _check_splits(known: list[int], tensor: Any, process_set: ProcessSet) -> None:
    if any(split > _LARGEST_SPLIT for split in known):
        raise InvalidArgument(f"splits={shown(known)}: alltoall expects 32-bit integer elements")
    if tf.executing_eagerly():
        return  # the core checks the rest
    if process_set.included() and len(known) != process_set.size():
        raise InvalidArgument(
            f"Number of entries in splits does not equal number of workers: {len(known)} for {process_set.size()}"
        )
    if any(split < 0 for split in known):
        raise InvalidArgument(f"Entries of splits must not be negative: {known}")
    rows = tensor.shape.as_list()[0] if tensor.shape.rank else None
    if rows is not None and sum(known) > rows:
        raise InvalidArgument(
            f"Sum of splits entries is greater than the first dimension of tensor: {sum(known)} > {rows}"
        )


def variables(given: Any, function: str) -> list[Any]:
    """A list of variables of TensorFlow or Keras. A single variable becomes a list of one.

    Raises:
        TypeError: ``given`` contains something else.
    """
    if _is_variable(given):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, str | bytes) or tf.is_tensor(given):
        raise TypeError(f"{function} takes a list of variables, not {shown(given)}")
    found = list(given)
    for each in found:
        if not _is_variable(each):
            raise TypeError(f"{function} takes variables; the list contains {shown(each)}")
    return found


def _is_variable(thing: Any) -> bool:
    return hasattr(thing, "assign") and hasattr(thing, "shape") and hasattr(thing, "dtype")
