"""Gives every sample to a rank again after a loss: a DistributedSampler is made anew at ``set_epoch()``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DistributedSampler

_log = logging.getLogger("horovod.torch")

_numbers: list[tuple[int, int]] = []
"""This process's rank and the number of ranks, from the first to the present ones that the script sees."""
_installed = False


def install() -> None:
    """Have ``DistributedSampler.set_epoch()`` look at the ranks; once."""
    global _installed
    if _installed:
        return
    _installed = True
    kind: Any = DistributedSampler
    set_epoch = kind.set_epoch

    def setting(sampler: Any, epoch: int) -> None:
        _renew(sampler)
        set_epoch(sampler, epoch)

    setting.__doc__, setting.__name__ = set_epoch.__doc__, set_epoch.__name__
    kind.set_epoch = setting


def begin(rank: int, size: int) -> None:
    """A group begins with these numbers."""
    _numbers[:] = [(rank, size)]


def change(rank: int, size: int, lost: Sequence[int]) -> None:
    """The script begins to see other numbers.

    Args:
        lost: the ranks that are gone, by the numbers that they had first.
    """
    _numbers.append((rank, size))
    if rank == 0:
        _log.warning(
            "%s lost; this script goes on with %d rank%s. The share of the data that %s had is missing until "
            "DistributedSampler.set_epoch() is called, which gives every sample to a rank again. Samplers of another kind keep "
            "the old numbers: what they left to a lost rank stays missing.",
            f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were",
            size,
            "" if size == 1 else "s",
            "it" if len(lost) == 1 else "they",
        )


def _renew(sampler: Any) -> None:
    """Make a sampler anew that has the group's numbers from before a loss."""
    now = _numbers[-1]
    had = (sampler.rank, sampler.num_replicas)
    if had == now or had not in _numbers[:-1]:
        return
    before = len(sampler)
    DistributedSampler.__init__(
        sampler,
        sampler.dataset,
        num_replicas=now[1],
        rank=now[0],
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )
    if now[0] == 0:
        _log.warning(
            "a DistributedSampler was made for %d ranks, and %d are left: from this epoch on each has %d samples instead of "
            "%d. len(loader) has grown, too: a schedule that was made for a number of steps, such as "
            "OneCycleLR(total_steps=...), would end early.",
            had[1],
            now[1],
            len(sampler),
            before,
        )
