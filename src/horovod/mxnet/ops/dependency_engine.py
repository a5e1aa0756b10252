"""Runs asynchronous operations in MXNet's dependency engine. A thread of the core finishes them later.

The engine starts an operation when all earlier writes of the arrays that it reads, and all earlier reads and writes of the
arrays that it writes, are done. Later uses of these arrays wait for the operation. MXNet's C API takes operations as function
pointers, which ctypes makes from Python functions. Two alternatives were rejected. Waiting in the script (``wait_to_read``)
before a collective is submitted stops the script and loses the overlap with backward. ``mx.operator.CustomOp`` occupies one of
a few threads until the operation is done, so two ranks with a different order can block each other.

The C API cannot report errors of such operations. In the engine an error is a C++ object, ``dmlc::Error``; it has the layout
of its base class ``std::runtime_error``, whose constructor the C++ library exports.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
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
"""Ends an operation. It is called once, on any thread, with the operation's error or None."""

Start = Callable[[Finish], None]
"""An operation. It is called on a thread of the engine and must not block."""

_Pointer = ctypes.c_void_p
_CPU_PRIORITIZED = ctypes.c_int(3)
"""``FnProperty::kCPUPrioritized``: the operation is not queued behind computations, which may occupy all of their threads."""
_EXIT_SECONDS = 30.0
"""How long the exit of the process waits for the engine's operations."""
_RETURN_SECONDS = 5.0
"""How long :func:`drain` waits for the engine's threads to return from Python functions."""


class _Context(ctypes.Structure):
    """``mxnet::Context``."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int32)]


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete``. The one that the engine passes is valid until the operation's function returns."""

    _fields_ = [("callback", _Pointer), ("engine", _Pointer), ("parameter", _Pointer)]


_CPU = _Context(1, 0)
_AsyncFunction = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Pointer)  # (RunContext*, CallbackOnComplete*, parameter)
_Deleter = ctypes.CFUNCTYPE(None, _Pointer)
_Complete = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Pointer)  # (Engine*, parameter, const dmlc::Error*)

_cpp = ctypes.CDLL("libstdc++.so.6")  # MXNet uses the same library
_make_error = _cpp["_ZNSt13runtime_errorC1EPKc"]  # std::runtime_error::runtime_error(const char*)
_make_error.argtypes, _make_error.restype = [_Pointer, ctypes.c_char_p], None
_destroy_error = _cpp["_ZNSt13runtime_errorD1Ev"]
_destroy_error.argtypes, _destroy_error.restype = [_Pointer], None
_ERROR_BYTES = 64  # more than the size of a std::runtime_error


class _Operation:
    """One operation, from the push until the engine deletes it."""

    __slots__ = ("arrays", "error", "left_out", "on_complete", "start", "thread")

    def __init__(self, start: Start, arrays: Sequence[Any], left_out: Callable[[], None]) -> None:
        self.start = start
        self.left_out = left_out
        self.arrays = arrays  # the engine keeps their memory alive, but not their handles
        self.error: BaseException | None = None
        self.thread = 0  # the thread that called ``start``
        self.on_complete = _OnComplete()

    def run(self, on_complete: int) -> None:
        self.thread = threading.get_ident()
        self.on_complete = _OnComplete.from_buffer_copy(ctypes.string_at(on_complete, ctypes.sizeof(_OnComplete)))
        try:
            self.start(self.finish)
        except BaseException as error:  # there is no Python caller to raise it to
            self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        completion = self.on_complete
        complete = ctypes.cast(completion.callback, _Complete)
        if error is None:
            complete(completion.engine, completion.parameter, None)
            return
        self.error = both_kinds(error)
        made = ctypes.create_string_buffer(_ERROR_BYTES)
        _make_error(made, text_of(error).encode())
        complete(completion.engine, completion.parameter, ctypes.addressof(made))  # MXNet copies the error
        _destroy_error(made)


_numbers = itertools.count(1)
_pushed: dict[int, _Operation] = {}
"""The operations in the engine, by the number that it passes to the callbacks."""
_all_gone = threading.Condition()
_engine_threads: set[int] = set()
"""The engine's threads that have called Python functions."""


@_AsyncFunction  # type: ignore[untyped-decorator]  # as ctypes makes it
def _run(_: int, on_complete: int, number: int) -> None:
    _engine_threads.add(threading.get_ident())
    _pushed[number].run(on_complete)


@_Deleter  # type: ignore[untyped-decorator]  # as above
def _forget(number: int) -> None:
    """Called when the engine deletes an operation. It may not have run it: it skips operations that depend on a failed one."""
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
    """Let the engine call ``start(finish)`` when the arrays are available, and reserve them until ``finish`` is called.

    Args:
        reads, writes: NDArrays in host memory. An array may be in both.
        priority: of several operations that could start, those with a higher priority start earlier.
        name: a name for MXNet's profiler.
        left_out: called instead of ``start`` if the computation of one of the arrays has failed.

    Raises:
        the operation's error, if MXNet's engine runs operations immediately (``MXNET_ENGINE_TYPE=NaiveEngine``).
    """
    operation = _Operation(start, (*reads, *writes), left_out)
    number = next(_numbers)
    writing = {variable(array): array.handle for array in writes}
    reading = {variable(array): array.handle for array in reads}
    const = [handle for variable, handle in reading.items() if variable not in writing]
    mutable = list(writing.values())
    _finish_first()
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
        raise operation.error  # a synchronous engine does not report the errors of its operations


class Reading:
    """A context in which arrays are computed and do not change.

    Waiting until they are computed is not enough: a later operation that reads an array may change its layout in memory.

    Args:
        arrays: NDArrays in host memory.
        name: a name for MXNet's profiler.

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
                # A synchronous engine waits in push() for the end of the operation, so the operation must end at once. Such an
                # engine does not change the arrays later.
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
    """Wait until the engine has deleted all operations, and none of its threads executes a Python function.

    Args:
        timeout: how many seconds to wait for the operations; None: without limit.
    """
    with _all_gone:
        _all_gone.wait_for(lambda: not _pushed, timeout)
    others = _engine_threads - {threading.get_ident()}
    deadline = time.monotonic() + _RETURN_SECONDS
    # The thread that called the last function needs the interpreter lock to return from it. After that it has no Python frame.
    while others & sys._current_frames().keys() and time.monotonic() < deadline:
        time.sleep(0.001)


# Before a fork, MXNet waits for all operations of its engine while it holds the interpreter lock. The operations of this module
# need that lock, so drain() waits for them first.
os.register_at_fork(before=drain)


@functools.cache
def _finish_first() -> None:
    """Have :func:`_finish` called at the end of the process, before ``hvd.shutdown()``, which was registered in ``init()``."""
    atexit.register(_finish)


def _finish() -> None:
    """Finish what the script has submitted, since other ranks may be a step behind, unless an exception ends this rank."""
    if getattr(sys, "last_value", None) is None:
        drain(_EXIT_SECONDS)


def _end() -> None:
    """Called at the end of the process, after ``hvd.shutdown()``, so no operation waits for other ranks.

    The engine must not call Python functions after the interpreter has ended. And MXNet aborts an exiting process if an array
    has an error that the script has not waited for.
    """
    drain(_EXIT_SECONDS)
    try:
        check_call(_LIB.MXNDArrayWaitAll())
    except Exception as error:
        _log.warning("the script has ended without waiting for arrays whose computation failed: %s", error)


atexit.register(_end)
