"""The rendezvous of the ranks of an mpi4py communicator, over that communicator.

The communicator is the user's, or ``MPI.COMM_WORLD`` if mpirun has started ranks on several hosts and no other rendezvous is
possible.

Only ``init()`` uses MPI; the collectives of the job run on other engines, unless the user asks for MPI. The communicator is not
duplicated. The all-gathers are over before :func:`exchange` returns, so MPI may be finalized before the job ends. Only
:func:`world` imports mpi4py.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from horovod.control.rendezvous.rendezvous_kinds import WithoutServer, not_all_came

_abandoned: list[Any] = []
"""Requests that timed out. MPI cannot cancel a collective, and may still write to the memory that these hold."""

_POLL_SECONDS = 1e-3
"""Seconds between two tests of a request. A blocking wait in MPI polls without pause and without a timeout."""


class RendezvousOverMpi(WithoutServer):
    """All-gathers over a communicator.

    Args:
        communicator: returns the ``mpi4py.MPI.Comm``, or raises TimeoutError after the given number of seconds; the first
            all-gather calls it.
        call: the function that the script has called, for errors.
    """

    def __init__(self, communicator: Callable[[float], Any], call: str = "hvd.init(comm=...)") -> None:
        super().__init__()
        self._communicator = communicator
        self._found: Any = None
        self._call = call

    def gather(self, rank: int, size: int, value: bytes, seconds: float) -> list[bytes]:
        """As :meth:`WithoutServer.gather`."""
        if self._found is None:
            self._found = self._communicator(seconds)
        return exchange(self._found, value, seconds, self._call)


def is_running() -> bool:
    """Whether the script has initialized MPI, through mpi4py."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def obtainable() -> bool:
    """Whether there is an mpi4py that :func:`world` could import."""
    return "mpi4py.MPI" in sys.modules or importlib.util.find_spec("mpi4py") is not None


def world(size: int, launcher: str, start: Callable[[float], Any], seconds: float) -> Any:
    """``MPI.COMM_WORLD`` of the ``size`` ranks that ``launcher`` has started. Every rank must call it.

    Initializes MPI if the script has not done so, which waits until all ranks do the same.

    Args:
        size: how many ranks the launcher has started.
        launcher: its name, for errors.
        start: returns ``mpi4py.MPI``, initialized; raises TimeoutError if that takes until its argument, a ``time.monotonic``.
        seconds: how long to wait for all ranks.

    Raises:
        RuntimeError: mpi4py cannot load an MPI library, or loads one that does not know these ranks.
        TimeoutError: not all ranks have initialized MPI within ``seconds``.
    """
    need = f"the {size} ranks that {launcher} started on several hosts must exchange their addresses over MPI, "
    try:
        import mpi4py

        known: Any = sys.modules.get("mpi4py.MPI")
        finalized = known is not None and known.Is_finalized()
        usable = not finalized and (mpi4py.rc.initialize or is_running())
        mpi = start(time.monotonic() + seconds) if usable else None
    except TimeoutError:
        ranks = f"{size} ranks that {launcher} started"
        raise not_all_came(ranks, "hvd.init(), in which MPI starts,", seconds) from None
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"{need}but mpi4py cannot be used: {error}. Install the MPI library whose mpirun starts the job where mpi4py finds "
            "it, or start the job with horovodrun --mpi, which needs no mpi4py"
        ) from error
    if mpi is None:
        state = "finalized already" if finalized else "not initialized: call MPI.Init() before hvd.init()"
        raise RuntimeError(f"{need}which is {state}")
    found = mpi.COMM_WORLD.Get_size()
    if found != size:
        library = mpi.Get_library_version().splitlines()[0].strip("\0 ")
        raise RuntimeError(
            f"{launcher} started {size} ranks, but the MPI library of mpi4py ({library}) sees {found}: it is not the one whose "
            "mpirun started the job. Use the mpirun of that library, or name the right library in MPI4PY_LIBMPI"
        )
    return mpi.COMM_WORLD


def exchange(communicator: Any, value: bytes, seconds: float, call: str = "hvd.init(comm=...)") -> list[bytes]:
    """All-gather ``value`` over an ``mpi4py.MPI.Comm``; every rank of it must call it. Returns the values by rank.

    Args:
        call: the function that the script has called, for an error.

    Raises:
        TimeoutError: a rank did not call within ``seconds``. MPI does not tell which.
    """
    deadline = time.monotonic() + seconds
    size = communicator.Get_size()
    lengths = np.empty(size, np.int64)
    own_length = np.array([len(value)], np.int64)
    _await(communicator.Iallgather(own_length, lengths), size, deadline, seconds, call)
    own = np.frombuffer(value, np.uint8)
    everything = np.empty(int(lengths.sum()), np.uint8)
    _await(communicator.Iallgatherv(own, [everything, lengths.tolist()]), size, deadline, seconds, call)
    ends = lengths.cumsum().tolist()
    return [everything[end - length : end].tobytes() for end, length in zip(ends, lengths.tolist(), strict=True)]


def _await(request: Any, size: int, deadline: float, seconds: float, call: str) -> None:
    while not request.Test():
        if time.monotonic() >= deadline:
            _abandoned.append(request)
            raise not_all_came(f"{size} ranks of the communicator", call, seconds)
        time.sleep(_POLL_SECONDS)
