"""One ``ncclComm_t``: made, called, watched, aborted and destroyed by NCCL's rules. This module knows no collectives.

**Non-blocking.** The communicator is made with ``blocking=0``: no call waits for a peer. While NCCL is still busy with a call
("in progress": it connects to a peer), the caller polls, within a limit, and gives up after :meth:`CommHandle.abort`. Only the
state of the communicator (``ncclCommGetAsyncError``) tells that a call is over: ``ncclCommSplit`` returns success while it
splits.

**Abort.** NCCL allows ``ncclCommAbort`` while kernels run, but not while another thread is inside a call. All calls are made
under one lock, which no thread holds while it waits, and none is made after an abort has begun. ``ncclCommAbort`` may itself
take long, so a separate thread calls it, without the lock.

**Late writes of NCCL.** NCCL writes the address of a new communicator when it has made it, which may be after the caller has
given up; ``ncclCommSplit`` writes on ranks without a part, too. So the memory for the address is freed only when the state has
shown that the call is over, or when ``ncclCommAbort`` has returned, which ends the call. The abort then also ends a part that
a split has made meanwhile: after the communicator that was split, since NCCL writes into the part when that is aborted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from horovod.comm.base import Aborted, DeviceFailure
from horovod.comm.device import DeviceRuntime
from horovod.comm.lasting import lasting_list
from horovod.comm.nccl import library
from horovod.comm.nccl.library import Nccl, NcclError

END_SECONDS = 10.0
"""How long ``close()`` waits for an abort, or for NCCL to finalize."""

_YIELD_SECONDS = 200e-6
"""How long a caller that polls NCCL yields its core between queries; after that it sleeps. NCCL usually needs less time."""

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 5e-3

SUMS = 32
"""The most reductions with a factor (``ncclRedOpCreatePreMulSum``) that a communicator keeps. Each takes about 16 bytes."""

Meanwhile: TypeAlias = Callable[[], None]
"""Called from time to time while a communicator is made, so that other ranks see that this rank is alive."""


def nothing() -> None:
    """Do nothing: the default where no other rank watches this one."""


_written_by_nccl = lasting_list()
"""Memory to which NCCL may still write the address of a communicator, each with the configuration that NCCL was given."""

_log = logging.getLogger("horovod.comm")


class CommHandle:
    """This rank's part of one communicator of NCCL; :meth:`create` and :meth:`split` make it.

    Args:
        nccl: the library.
        runtime: the device of the communicator.
        rank: this rank's index in the communicator.
        address: the ``ncclComm_t``, which this object owns from now on.
        limit: seconds that NCCL may be busy with one call.

    Attributes:
        queued: how many collectives were queued.
        over: how many of them are known to have succeeded.
    """

    def __init__(self, nccl: Nccl, runtime: DeviceRuntime, rank: int, address: int, limit: float) -> None:
        self.address = address
        self.queued = self.over = 0
        self._nccl = nccl
        self._c = nccl.functions
        self._runtime = runtime
        self._rank = rank
        self._limit = limit
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # an abort or a close takes it, and never releases it
        self._aborting = False
        self._aborted = threading.Event()
        self._closed = False
        self._written: tuple[ctypes.c_void_p, Any] | None = None  # in _written_by_nccl, for a call that is not over
        self._sums: OrderedDict[tuple[np.dtype[Any], float], int] = OrderedDict()  # least recently used first

    @classmethod
    def create(
        cls,
        nccl: Nccl,
        runtime: DeviceRuntime,
        rank: int,
        size: int,
        unique_id: bytes,
        deadline: float,
        limit: float,
        meanwhile: Meanwhile = nothing,
    ) -> CommHandle:
        """Make a new communicator. All of its ranks must call this.

        Args:
            rank, size: this rank's index in the communicator, and the number of ranks.
            unique_id: made by one rank, and the same on all.
            deadline: ``time.monotonic`` by which all ranks must have called this.
            limit: seconds that NCCL may be busy with one later call.
            meanwhile: called from time to time while this waits for the other ranks.

        Raises:
            NcclError: the communicator cannot be made.
        """
        made, config = written = ctypes.c_void_p(), library.NcclConfig.non_blocking()
        identity = library.UniqueId.from_buffer_copy(unique_id)
        _written_by_nccl.append(written)
        with runtime.chosen():
            result = nccl.functions.ncclCommInitRankConfig(
                ctypes.byref(made), size, identity, rank, ctypes.byref(config)
            )
        if result not in (library.SUCCESS, library.IN_PROGRESS) or not made.value:
            raise NcclError(f"ncclCommInitRankConfig: {nccl.error_text(result)}")
        handle = cls(nccl, runtime, rank, made.value, limit)
        handle._written = written
        handle._await_made("ncclCommInitRankConfig", result, deadline, meanwhile)
        return handle

    def split(self, part: int | None, rank: int, deadline: float, meanwhile: Meanwhile = nothing) -> CommHandle | None:
        """Make a communicator of some ranks of this one. All ranks of this one must call it, while nothing is in flight on it.

        The two communicators share nothing, so each can be aborted and ended without the other.

        Args:
            part: a number that is the same on all ranks of the new communicator; None if this rank is not among them.
            rank: this rank's index in the new communicator.
            deadline: ``time.monotonic`` by which all ranks must have called this.
            meanwhile: called from time to time while this waits for the other ranks.

        Returns:
            The new communicator; None if this rank is not part of it.

        Raises:
            NcclError: the communicator cannot be made. This one may be half split: abort it.
            Aborted: this communicator was aborted meanwhile.
        """
        made, config = written = ctypes.c_void_p(), library.NcclConfig.non_blocking()
        color = library.NO_COLOR if part is None else part
        with self._runtime.chosen():
            with self._lock:
                self._check()
                _written_by_nccl.append(written)
                self._written = written
                result = self._c.ncclCommSplit(self.address, color, rank, ctypes.byref(made), ctypes.byref(config))
            # This communicator is in progress until the new one is made.
            self._settle("ncclCommSplit", result, deadline, meanwhile)
            self._over()  # from here on an abort leaves the part alone
        if part is None:
            return None
        if not made.value:
            raise NcclError("ncclCommSplit made no communicator")
        handle = CommHandle(self._nccl, self._runtime, rank, made.value, self._limit)
        handle._await_made("ncclCommSplit", library.SUCCESS, deadline, meanwhile)
        return handle

    def _await_made(self, call: str, result: int, deadline: float, meanwhile: Meanwhile) -> None:
        try:
            with self._runtime.chosen():
                self._settle(call, result, deadline, meanwhile)
            self._over()
        except BaseException:
            self._give_up()
            raise

    def _over(self) -> None:
        """Note that NCCL has written the address of the new communicator for the last time."""
        with self._lock:
            self._check()
            written, self._written = self._written, None
        _forget(written)

    def _give_up(self) -> None:
        self.abort()
        self.close()

    # Calls

    def call(self, name: str, *arguments: Any) -> None:
        """Make one call. Its errors show at once, or at the end of the :meth:`group`.

        Raises:
            NcclError: NCCL refuses the call.
        """
        result = getattr(self._c, name)(*arguments)
        if result not in (library.SUCCESS, library.IN_PROGRESS):
            raise NcclError(f"{name}: {self._nccl.error_text(result)}")

    @contextmanager
    def group(self) -> Iterator[None]:
        """A block from ``ncclGroupStart`` to ``ncclGroupEnd``, under the lock. Its end waits until NCCL has queued the calls.

        Raises:
            NcclError: NCCL refuses the calls, or is busy with them for longer than the limit.
            Aborted: the communicator was aborted.
        """
        with self._lock:
            self._check()
            self._nccl.check("ncclGroupStart", self._c.ncclGroupStart())
            try:
                yield
            finally:  # also after an error, since a group belongs to the thread and not to the communicator
                result = self._c.ncclGroupEnd()
        self._settle("ncclGroupEnd", result, time.monotonic() + self._limit)

    def multiplied_sum(self, dtype: np.dtype[Any], factor: float) -> int:
        """NCCL's reduction that multiplies by ``factor`` and then sums; cached. Must not be called inside a group."""
        known = self._sums.pop((dtype, factor), None)
        if known is None:
            made = ctypes.c_int()
            value = library.scalar(factor, dtype)
            with self._lock:
                self._check()
                while len(self._sums) >= SUMS:  # no call uses the oldest one now
                    self.call("ncclRedOpDestroy", self._sums.popitem(last=False)[1], self.address)
                result = self._c.ncclRedOpCreatePreMulSum(
                    ctypes.byref(made),
                    ctypes.cast(value, ctypes.c_void_p),
                    library.DATA_TYPES[dtype],
                    library.residence(),
                    self.address,
                )
            self._nccl.check("ncclRedOpCreatePreMulSum", result)
            known = made.value
        self._sums[dtype, factor] = known
        return known

    def _check(self) -> None:
        if self._aborting:
            raise Aborted("the communicator was aborted")

    def _settle(self, call: str, result: int, deadline: float, meanwhile: Meanwhile = nothing) -> None:
        """Return when the state says that NCCL is no longer busy with a call that returned ``result``."""
        pause, yields_until = _FIRST_PAUSE, time.monotonic() + _YIELD_SECONDS
        while True:
            if result not in (library.SUCCESS, library.IN_PROGRESS):
                raise NcclError(f"{call}: {self._nccl.error_text(result)}")
            with self._lock:
                self._check()
                result = self._nccl.async_error(self.address)
            if result == library.SUCCESS:
                return
            if result != library.IN_PROGRESS:
                continue
            now = time.monotonic()
            if now > deadline:
                raise NcclError(
                    f"{call}: NCCL did not finish within the time limit: a rank did not make this call, or the ranks cannot "
                    f"reach one "
                    "another (NCCL_DEBUG=INFO shows the network interfaces that NCCL uses, NCCL_SOCKET_IFNAME chooses one)"
                )
            if now < yields_until:  # NCCL sends no notification, so it must be polled
                os.sched_yield()
                continue
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # The end

    def failure(self) -> BaseException | None:
        """The error of this communicator, as far as NCCL knows; None if there is none. Any thread may call it. Never waits."""
        if self._aborting:
            return Aborted("the communicator was aborted")
        if not self._lock.acquire(blocking=False):
            return None  # a call is running, and will find the error itself
        try:
            # ncclCommAbort and ncclCommDestroy are called under the lock, so this must be checked under the lock, too.
            if self._ending.locked():
                return None
            state = self._nccl.async_error(self.address)
            if state in (library.SUCCESS, library.IN_PROGRESS):
                return None
            return NcclError(self._nccl.error_text(state))
        except NcclError as error:
            return error
        finally:
            self._lock.release()

    def abort(self) -> None:
        """Abort all running calls and kernels. Any thread may call it, any number of times; it returns at once."""
        if self._ending.acquire(blocking=False):
            self._begin_abort()

    def _begin_abort(self) -> None:
        self._aborting = True
        threading.Thread(target=self._abort, name="horovod-nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        with (
            self._lock
        ):  # the last call has returned: within microseconds, since no call under the lock waits for a peer
            written, self._written = self._written, None
        with self._runtime.chosen():
            self._abort_one(self.address)
            made = None if written is None else written[0].value
            if made and made != self.address:
                self._abort_one(made)
        _forget(written)
        self._aborted.set()

    def _abort_one(self, address: int) -> None:
        result = self._c.ncclCommAbort(address)
        if result not in (library.SUCCESS, library.IN_PROGRESS):
            _log.warning("ncclCommAbort: %s", self._nccl.error_text(result))

    def close(self) -> None:
        """Release the communicator: finalize it together with all other ranks, or wait for its abort to end.

        Each of these waits takes at most :data:`END_SECONDS`. If finalizing fails, the communicator is aborted."""
        if self._closed:
            return
        in_good_order = False
        if self._ending.acquire(blocking=False):
            try:
                self._finish()
                in_good_order = True
            except DeviceFailure as error:
                _log.warning("NCCL was not finalized: %s", error)
                self._begin_abort()
        if not in_good_order and not self._aborted.wait(END_SECONDS):
            _log.error(
                "rank %d of the group: ncclCommAbort did not return within %g seconds; kernels may still run on %s, so end "
                "this process instead of using the memory of that device again",
                self._rank,
                END_SECONDS,
                self._runtime.device,
            )
        self._closed = True

    def _finish(self) -> None:
        with self._runtime.chosen():
            while self._sums:
                self.call("ncclRedOpDestroy", self._sums.popitem()[1], self.address)
            with self._lock:
                result = self._c.ncclCommFinalize(self.address)
            self._settle("ncclCommFinalize", result, time.monotonic() + END_SECONDS)
            with self._lock:
                result = self._c.ncclCommDestroy(self.address)
            if result != library.IN_PROGRESS:
                self._nccl.check("ncclCommDestroy", result)


def _forget(written: object) -> None:
    """Drop memory of :data:`_written_by_nccl`: NCCL is done with it."""
    _written_by_nccl[:] = [each for each in _written_by_nccl if each is not written]
