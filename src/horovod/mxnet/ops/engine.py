"""MXNet's dependency engine, for operations that finish later, on a thread of ours.

The engine runs an operation when the pending writes of what it reads, and the pending reads and writes of what it writes, are
done; whoever uses the arrays afterwards waits for the operation. MXNet's C API takes operations as function pointers, which
ctypes makes of Python functions. What else was considered: waiting in the script (``wait_to_read``) before a collective is
submitted, which keeps the script from running ahead and loses the overlap with backward; and ``mx.operator.CustomOp``, which
occupies one of a few threads until the operation is done, so that two ranks with a different order can block each other.

The C API has no errors for such operations. In the engine an error is a C++ object, ``dmlc::Error``; it has the layout of its
base class ``std::runtime_error``, whose constructor the C++ library exports.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mxnet.base import _LIB, check_call

from horovod.mxnet.ops.arrays import variable
from horovod.mxnet.ops.errors import HorovodInternalError, both_kinds, text_of

_log = logging.getLogger("horovod.mxnet")

Finish = Callable[[BaseException | None], None]
"""Says that an operation is over: called once, on any thread, with its error or None."""

Start = Callable[[Finish], None]
"""An operation. Called on a thread of the engine, which it must not block."""

_Pointer = ctypes.c_void_p
_CPU_PRIORITIZED = ctypes.c_int(3)
"""``FnProperty::kCPUPrioritized``: not queued behind the computations, which may occupy all of their threads."""
_EXIT_SECONDS = 30.0
_RETURN_SECONDS = 5.0


class _Context(ctypes.Structure):
    """``mxnet::Context``."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int32)]


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete``. The engine passes one that lives until the operation's function returns."""

    _fields_ = [("callback", _Pointer), ("engine", _Pointer), ("parameter", _Pointer)]


_CPU = _Context(1, 0)
_AsyncFunction = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Pointer)  # (RunContext*, CallbackOnComplete*, parameter)
_Deleter = ctypes.CFUNCTYPE(None, _Pointer)
_Complete = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Pointer)  # (Engine*, parameter, const dmlc::Error*)

_cpp = ctypes.CDLL("libstdc++.so.6")  # that of MXNet: a process has one
_make_error = _cpp["_ZNSt13runtime_errorC1EPKc"]  # std::runtime_error::runtime_error(const char*)
_make_error.argtypes, _make_error.restype = [_Pointer, ctypes.c_char_p], None
_destroy_error = _cpp["_ZNSt13runtime_errorD1Ev"]
_destroy_error.argtypes, _destroy_error.restype = [_Pointer], None
_ERROR_BYTES = 64  # more than it has


class _Operation:
    """One operation, from the push until the engine forgets it."""

    __slots__ = ("arrays", "error", "left_out", "on_complete", "start", "thread")

    def __init__(self, start: Start, arrays: Sequence[Any], left_out: Callable[[], None]) -> None:
        self.start = start
        self.left_out = left_out
        self.arrays = arrays  # the engine keeps their memory, not the handles by which it is found
        self.error: BaseException | None = None
        self.thread = 0  # that called ``start``
        self.on_complete = _OnComplete()

    def run(self, on_complete: int) -> None:
        self.thread = threading.get_ident()
        self.on_complete = _OnComplete.from_buffer_copy(ctypes.string_at(on_complete, ctypes.sizeof(_OnComplete)))
        try:
            self.start(self.finish)
        except BaseException as error:  # no Python code is above that could take it
            self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        told = self.on_complete
        complete = ctypes.cast(told.callback, _Complete)
        if error is None:
            complete(told.engine, told.parameter, None)
            return
        self.error = both_kinds(error)
        made = ctypes.create_string_buffer(_ERROR_BYTES)
        _make_error(made, text_of(error).encode())
        complete(told.engine, told.parameter, ctypes.addressof(made))  # copies it
        _destroy_error(made)


_numbers = itertools.count(1)
_pushed: dict[int, _Operation] = {}
"""What the engine knows of, by the number that it passes back."""
_all_gone = threading.Condition()
_engine_threads: set[int] = set()
"""The engine's threads that have called Python functions."""


@_AsyncFunction  # type: ignore[untyped-decorator]  # as ctypes makes it
def _run(_: int, on_complete: int, number: int) -> None:
    _engine_threads.add(threading.get_ident())
    _pushed[number].run(on_complete)


@_Deleter  # type: ignore[untyped-decorator]  # as above
def _forget(number: int) -> None:
    """The engine is done with an operation, which it may never have run: it leaves out what depends on a failed one."""
    operation = _pushed.pop(number)
    if not operation.thread:
        _engine_threads.add(threading.get_ident())
        operation.left_out()
    if not _pushed:
        with _all_gone:
            _all_gone.notify_all()


def _nothing() -> None:
    pass


def push(
    start: Start,
    reads: Sequence[Any],
    writes: Sequence[Any],
    priority: int,
    name: str,
    left_out: Callable[[], None] = _nothing,
) -> None:
    """Have the engine call ``start(finish)`` when the arrays are free for it, and keep them reserved until ``finish``.

    Args:
        reads, writes: NDArrays in host memory; an array may be in both.
        priority: operations with a higher one start earlier, where several could.
        name: for MXNet's profiler.
        left_out: is called in place of ``start`` where the computation of one of the arrays has failed.

    Raises:
        the operation's error, where MXNet's engine runs operations at once (``MXNET_ENGINE_TYPE=NaiveEngine``).
    """
    operation = _Operation(start, (*reads, *writes), left_out)
    number = next(_numbers)
    writing = {variable(array): array.handle for array in writes}
    reading = {variable(array): array.handle for array in reads}
    const = [handle for variable, handle in reading.items() if variable not in writing]
    mutable = list(writing.values())
    _pushed[number] = operation
    check_call(
        _LIB.MXEnginePushAsyncND(
            _run,
            _Pointer(number),
            _forget,
            ctypes.byref(_CPU),
            (_Pointer * len(const))(*const),
            len(const),
            (_Pointer * len(mutable))(*mutable),
            len(mutable),
            ctypes.byref(_CPU_PRIORITIZED),
            ctypes.c_int(priority),
            name.encode(),
            ctypes.c_bool(False),
        )
    )
    if operation.error is not None and operation.thread == threading.get_ident():
        raise operation.error  # an engine that runs operations at once does not hand their errors on


class Reading:
    """A block in which arrays are computed, and stay as they are.

    To wait until they are computed would not be enough: after an operation that reads an array, MXNet may lay it out anew.

    Args:
        arrays: NDArrays in host memory.
        name: for MXNet's profiler.

    Raises:
        MXNetError: the computation of one of them has failed.
    """

    def __init__(self, arrays: Sequence[Any], name: str) -> None:
        self._arrays, self._name = arrays, name
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._finish: Finish | None = None
        self._over = self._failed = False

    def __enter__(self) -> None:
        pusher = threading.get_ident()

        def start(finish: Finish) -> None:
            with self._lock:
                # An engine that runs operations at once waits in the push for their ends, and changes nothing later.
                at_once = self._over or threading.get_ident() == pusher
                if not at_once:
                    self._finish = finish
            if at_once:
                finish(None)
            self._known.set()

        def left_out() -> None:
            self._failed = True
            self._known.set()

        push(start, self._arrays, [], 0, self._name, left_out)
        try:
            self._known.wait()
            if self._failed:
                for array in self._arrays:
                    array.wait_to_read()
                raise HorovodInternalError(f"{self._name}: the computation of its arrays has failed")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over, finish = True, self._finish
        if finish is not None:
            finish(None)


def drain(timeout: float | None = None) -> None:
    """Wait until the engine has forgotten all operations, and none of its threads is inside a Python function any more."""
    with _all_gone:
        _all_gone.wait_for(lambda: not _pushed, timeout)
    others = _engine_threads - {threading.get_ident()}
    deadline = time.monotonic() + _RETURN_SECONDS
    # A thread that has called the last function needs Python's lock once more, to return from it. Then its frames are gone.
    while others & sys._current_frames().keys() and time.monotonic() < deadline:
        time.sleep(0.001)


# MXNet stops its engine in a process that is about to fork, and waits for all operations while it keeps Python's lock, which
# ours need. So they are waited for before.
os.register_at_fork(before=drain)


def _end() -> None:
    """The process ends; ``hvd.shutdown()`` was called before, so nothing waits for peers.

    The engine must not call into an interpreter that is gone. And an error that nobody has waited for would make MXNet's own
    exit abort the process.
    """
    drain(_EXIT_SECONDS)
    try:
        check_call(_LIB.MXNDArrayWaitAll())
    except Exception as error:
        _log.warning("the script has ended without waiting for arrays whose computation failed: %s", error)


atexit.register(_end)
