"""The rendezvous of the ranks of an mpi4py communicator, over that communicator.

Only ``init()`` uses MPI; every collective of the job runs on Horovod's own engines. The communicator is not duplicated. The two
all-gathers are over before :func:`exchange` returns, so MPI may be finalized before the job ends. Nothing of MPI is imported.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

_abandoned: list[Any] = []
"""Requests that timed out. MPI cannot cancel a collective, and may still write to the memory that these hold."""

_POLL_SECONDS = 1e-3
"""Between two tests of a request. A blocking wait in MPI polls without pause, and without a timeout."""


def exchange(communicator: Any, value: bytes, seconds: float) -> list[bytes]:
    """All-gather ``value`` over an ``mpi4py.MPI.Comm``; every rank of it must call it. Returns the values by rank.

    Raises:
        TimeoutError: a rank did not call within ``seconds``. MPI does not tell which.
    """
    deadline = time.monotonic() + seconds
    size = communicator.Get_size()
    lengths = np.empty(size, np.int64)
    own_length = np.array([len(value)], np.int64)
    _await(communicator.Iallgather(own_length, lengths), size, deadline, seconds)
    own = np.frombuffer(value, np.uint8)
    everything = np.empty(int(lengths.sum()), np.uint8)
    _await(communicator.Iallgatherv(own, [everything, lengths.tolist()]), size, deadline, seconds)
    ends = lengths.cumsum().tolist()
    return [everything[end - length : end].tobytes() for end, length in zip(ends, lengths.tolist(), strict=True)]


def _await(request: Any, size: int, deadline: float, seconds: float) -> None:
    while not request.Test():
        if time.monotonic() >= deadline:
            _abandoned.append(request)
            raise TimeoutError(
                f"not all {size} ranks of the communicator called hvd.init(comm=...) within {seconds:.3g} seconds. Look at "
                "their output; if they only need more time to start, raise HOROVOD_START_TIMEOUT"
            )
        time.sleep(_POLL_SECONDS)
