"""One rank's part of arrays in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from horovod._bindings.sharding.shares import Uneven, share


def shard_arrays(data: Any, rank: int, size: int, uneven: Uneven) -> Any:
    """This rank's rows of every array in ``data``, in the same structure.

    Raises:
        ValueError: there are no arrays, or they have no rows or different lengths.
    """
    lengths = {f"{path or 'data'}: {array.shape}": len(array) for path, array in _arrays(data)}
    if not lengths:
        raise ValueError(f"neither a tf.data.Dataset nor arrays: {type(data).__name__}")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays of different lengths: {'; '.join(lengths)}")
    samples = next(iter(lengths.values()))
    mine = share(samples, rank, size, uneven)
    rows: Any = slice(rank, rank + (mine - 1) * size + 1, size)
    if uneven == "repeat" and samples % size:
        rows = np.arange(mine) * size + rank
        rows %= samples
    return _mapped(data, lambda array: array[rows])


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every array in ``data``. None, which Keras uses for weights that are not given, stays None."""
    if data is None:
        return None
    if isinstance(data, dict):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, tuple | list):
        values = [_mapped(value, change) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return change(np.asarray(data))


def _arrays(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every array in ``data`` with its path."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _arrays(value, f"{path}[{key!r}]")
    elif isinstance(data, tuple | list):
        for number, value in enumerate(data):
            yield from _arrays(value, f"{path}[{number}]")
    elif data is not None:
        array = np.asarray(data)
        if not array.ndim:
            raise ValueError(
                f"{path or 'data'} is neither a tf.data.Dataset nor an array with rows: {type(data).__name__}"
            )
        yield path, array
