"""Measures how long the script waits for PyTorch's data loaders, and how many samples they deliver; with ``HOROVOD_DEBUG``,
also which batches these were.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, dataloader

from horovod.observe.call_site import caller
from horovod.observe.step_clock import DATA, clock

_followed = False
_MOST_BYTES = 1 << 16
"""The digest of a batch covers at most this number of bytes."""


class Batches(NamedTuple):
    """The batches that the data loaders have delivered on this rank.

    Attributes:
        digest: a digest of the first bytes of each batch's first tensor; empty if there was none.
        sampler: the seed and epoch of the last DistributedSampler, as text; "" if there was none.
        line: the line of the script that asked for the last batch.
    """

    digest: bytes
    sampler: str
    line: str


class Loaded:
    """The batches that were delivered since the last call of :meth:`take`.

    Attributes:
        wanted: whether batches are recorded.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._digest: Any = None
        self._sampler = self._line = ""

    def note(self, batch: Any, iterator: Any) -> None:
        """Record a batch that a data loader has delivered.

        Args:
            iterator: the iterator of the data loader.
        """
        first = first_tensor(batch)
        if isinstance(first, torch.Tensor) and first.layout is torch.strided:
            self._digest = self._digest or hashlib.blake2b(digest_size=8)
            part = first.detach().reshape(-1)[: _MOST_BYTES // first.element_size()].contiguous()
            self._digest.update(part.resolve_conj().view(torch.uint8).cpu().numpy().tobytes())
        sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
        if isinstance(sampler, DistributedSampler):
            self._sampler = f"seed {sampler.seed}, epoch {sampler.epoch}"
        self._line = caller()

    def take(self) -> Batches:
        found = Batches(b"" if self._digest is None else self._digest.digest(), self._sampler, self._line)
        self._digest = None
        return found


loaded = Loaded()
"""The batches of this process."""


def follow_data_loaders() -> None:
    """Make all data loaders of this process report to the step clock and to :data:`loaded` from now on. They deliver the same
    batches as before."""
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
        if loaded.wanted:
            loaded.note(batch, self)
        return batch

    kind.__next__ = timed


def samples_in(batch: Any) -> int:
    """The number of rows of the first tensor of a batch; 0 if :func:`first_tensor` finds none."""
    first = first_tensor(batch)
    return first.shape[0] if first is not None and first.ndim else 0


def first_tensor(batch: Any) -> torch.Tensor | np.ndarray[Any, Any] | None:
    """The first tensor or array in a batch: the batch itself, or the first element of mappings, lists and tuples, at most two
    levels deep. None if there is none."""
    for _ in range(3):
        if isinstance(batch, torch.Tensor | np.ndarray):
            return batch
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        else:
            return None
    return None
