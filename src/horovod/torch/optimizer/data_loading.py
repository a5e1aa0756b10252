"""Tells the clock of the steps how long the script waits for PyTorch's data loaders, and how many samples they deliver."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.utils.data import dataloader

from horovod.observe.step_clock import DATA, clock

_followed = False


def follow_data_loaders() -> None:
    """Have all data loaders of this process tell it from now on. An iterator does as before."""
    global _followed
    if _followed:
        return
    _followed = True
    kind: Any = dataloader._BaseDataLoaderIter  # the class of all their iterators
    following = kind.__next__

    @functools.wraps(following)
    def timed(self: Any) -> Any:
        if not clock.trains():
            return following(self)
        before = clock.enter(DATA)
        try:
            batch = following(self)
        finally:
            clock.enter(before)
        clock.samples += samples_in(batch)
        return batch

    kind.__next__ = timed


def samples_in(batch: Any) -> int:
    """The rows of the first tensor of a batch; 0 if it has none that is easily found."""
    for _ in range(3):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 0
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        else:
            return 0
    return 0
