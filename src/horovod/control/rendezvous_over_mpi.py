"""Where the ranks of an mpi4py communicator exchange address cards: the communicator itself.

Only the cards travel over MPI, and only inside ``init()``; every collective of the job runs on Horovod's own engines. The
communicator is neither duplicated nor kept busy: two all-gathers on it are over before :func:`exchange` returns, so there
is nothing to free when MPI is finalized before the job has ended. Imports nothing of MPI: it uses what it is given.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

_abandoned: list[Any] = []
"""Requests that were given up: MPI cannot take a collective back, and may still write to what they hold."""

_LOOK_AGAIN = 1e-3
"""Seconds between looks at whether the others have come; blocking in MPI would look without pause, and without end."""


def exchange(communicator: Any, value: bytes, seconds: float) -> list[bytes]:
    """All-gather ``value`` over an ``mpi4py.MPI.Comm``; every rank of it must call it. Returns the values by rank.

    Raises:
        TimeoutError: some rank did not come within ``seconds``. MPI does not tell which.
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
        time.sleep(_LOOK_AGAIN)
