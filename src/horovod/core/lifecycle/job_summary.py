"""The job in one line, which rank 0 logs in ``init()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from horovod.comm.base import Communicator

_MOST_HOSTS = 8
"""How many hosts the line names."""


def job_summary(hosts: Sequence[str], communicator: Communicator, device_engine: str) -> str:
    """The ranks, hosts and engines of the job, and why these engines were chosen.

    Args:
        hosts: the name of each rank's host, by rank.
        communicator: of all ranks, for host memory.
        device_engine: the engine for the memory of GPUs; "" if it is staged in host memory.
    """
    counts = Counter(hosts)
    shown = ", ".join(f"{host}: {number}" for host, number in list(counts.items())[:_MOST_HOSTS])
    more = f" and {len(counts) - _MOST_HOSTS} more" if len(counts) > _MOST_HOSTS else ""
    why = f" ({communicator.chosen_because})" if communicator.chosen_because else ""
    device = f", memory of GPUs by {device_engine}" if device_engine else ""
    ranks, several = f"{len(hosts)} rank{'s' * (len(hosts) > 1)}", f"{len(counts)} host{'s' * (len(counts) > 1)}"
    return f"{ranks} on {several} ({shown}{more}); host memory travels by {communicator.name}{why}{device}"
