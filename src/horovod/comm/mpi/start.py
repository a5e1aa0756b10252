"""Initialises and finalizes MPI on a separate thread, so that a waiting rank can give up.

``MPI_Init_thread`` waits for every process that the launcher has started, without a time limit, and mpi4py calls it with
Python's interpreter locked: no other thread of this process, and no signal handler, would run meanwhile. This module calls it
through ctypes, which unlocks the interpreter. MPI requires that the thread that has initialised it also finalizes it, so that
thread stays.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from horovod.comm.mpi.process_end import leave_libraries_alone

_LOOK_SECONDS = 0.5
"""Seconds between two checks whether another process has ended, while this one waits for the others."""

_log = logging.getLogger("horovod.comm")
_T = TypeVar("_T")


class MpiThread:
    """The thread that initialises MPI and finalizes it.

    Args:
        mpi: the module ``mpi4py.MPI``. MPI is not initialised.
        level: the thread level to ask MPI for, such as ``MPI.THREAD_MULTIPLE``.
    """

    def __init__(self, mpi: Any, level: int) -> None:
        self._mpi = mpi
        self._level = level
        self._initialised: Future[None] = Future()
        self._may_end = threading.Event()
        self._agreed: Callable[[], bool] = bool
        self._finalized: Future[bool] = Future()
        threading.Thread(target=self._run, name="horovod-mpi", daemon=True).start()

    def _run(self) -> None:
        _tell(self._initialised, lambda: _initialise(self._mpi, self._level))
        self._may_end.wait()
        _tell(self._finalized, self._finalize_if_agreed)

    def wait(self, deadline: float, ended_ranks: Callable[[], str]) -> None:
        """Wait until MPI is initialised.

        Args:
            deadline: ``time.monotonic`` by which MPI must be initialised.
            ended_ranks: names the ranks whose processes have ended, "" if none is known; called repeatedly.

        Raises:
            TimeoutError: MPI is not initialised, because the deadline has passed or a rank has ended, which the message names.
                The thread is abandoned.
            RuntimeError: MPI could not be initialised.
        """
        began = time.monotonic()
        gone = ""
        while not gone:
            left = deadline - time.monotonic()
            try:
                return self._initialised.result(max(0.0, min(left, _LOOK_SECONDS)))
            except FutureTimeoutError:
                gone = ended_ranks()
                if left <= 0:
                    break
        leave_libraries_alone()
        raise TimeoutError(
            f"MPI has not started {'' if gone else f'within {time.monotonic() - began:.3g} seconds '}in this process, since it "
            f"waits for all ranks of the launcher{f', and {gone} has ended' if gone else ''}"
        )

    def finalize(self, agreed: Callable[[], bool], given_up: Callable[[], bool]) -> bool:
        """Finalize MPI, which waits for all ranks to do the same, if they agree.

        Both is done on the thread: once a rank has ended, any call of MPI may never return.

        Args:
            agreed: calls MPI, and returns whether all ranks finalize it.
            given_up: whether to leave the thread alone; called repeatedly.

        Returns:
            Whether MPI is finalized.
        """
        self._agreed = agreed
        self._may_end.set()
        while True:
            try:
                return self._finalized.result(_LOOK_SECONDS)
            except FutureTimeoutError:
                if given_up():
                    leave_libraries_alone()
                    return False

    def _finalize_if_agreed(self) -> bool:
        if not self._agreed():
            return False
        self._mpi.Finalize()
        return True


def _tell(outcome: Future[_T], call: Callable[[], _T]) -> None:
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def _initialise(mpi: Any, level: int) -> None:
    try:
        function = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        _log.warning(
            "MPI starts without a time limit, and with the interpreter locked: mpi4py's module does not export MPI_Init_thread"
        )
        mpi.Init_thread(level)
        return
    # int MPI_Init_thread(int *argc, char ***argv, int required, int *provided)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    function.restype = ctypes.c_int
    provided = ctypes.c_int()
    if code := function(None, None, level, ctypes.byref(provided)):
        raise RuntimeError(f"MPI_Init_thread returned {code}")
    if sys.modules["mpi4py"].rc.errors == "exception":  # mpi4py's default
        for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py turns errors into exceptions
