"""How many samples and steps each rank gets. Nothing is communicated: every rank knows the number of samples."""

from __future__ import annotations

from typing import Final, Literal

from horovod.core.lifecycle.process_set import ProcessSet

Uneven = Literal["drop", "repeat", "keep"]
"""The treatment of samples that remain when all ranks have the same number."""

KINDS: Final = ("drop", "repeat", "keep")


def rank_and_size(process_set: ProcessSet) -> tuple[int, int]:
    """This process's rank in a process set, and the size of the set.

    Raises:
        ValueError: Horovod is not initialised, the set is not registered, or this process is not in it.
    """
    rank, size = process_set.rank(), process_set.size()
    if rank is None or size is None:
        raise ValueError(f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()")
    return rank, size


def share(samples: int, rank: int, size: int, uneven: Uneven) -> int:
    """The number of samples of rank ``rank``, if ``size`` ranks share ``samples`` samples.

    Raises:
        ValueError: on all ranks, if a rank would get no samples.
    """
    if samples < 1:
        raise ValueError("the data set is empty")
    if uneven == "repeat":
        return -(-samples // size)
    if samples < size:
        raise ValueError(
            f"{samples} samples are too few for {size} ranks: some would have none. "
            'Start fewer ranks, or repeat samples with uneven="repeat"'
        )
    return (samples - rank + size - 1) // size if uneven == "keep" else samples // size


def steps(samples: int, batch_size: int, drop_remainder: bool) -> int:
    """The number of batches of a rank with ``samples`` samples.

    Raises:
        ValueError: it is 0.
    """
    found = samples // batch_size if drop_remainder else -(-samples // batch_size)
    if not found:
        raise ValueError(
            f"a rank's {samples} samples are fewer than one batch of {batch_size}, and drop_remainder=True leaves them out; "
            "lower batch_size, which counts the samples of one rank"
        )
    return found
