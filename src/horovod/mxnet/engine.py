"""MXNet's dependency engine, for operations that finish later, on a thread of ours.

The engine runs an operation when the pending writes of what it reads, and the pending reads and writes of what it writes, are
done; whoever uses the arrays afterwards waits for the operation. MXNet's C API takes operations as function pointers, which
ctypes makes of Python functions. What else was considered: waiting in the script (``wait_to_read``) before a collective is
submitted, which keeps the script from running ahead and loses the overlap with backward; and ``mx.operator.CustomOp``, which
occupies one of a few threads until the operation is done, so that two ranks with a different order can block each other.

Two things the C API lacks. An error of an operation is a C++ object, ``dmlc::Error``; it has the layout of its base class
``std::runtime_error``, whose constructor the C++ library exports. And oneDNN's operators leave arrays in a layout of their
own, which the C API undoes only where it may wait; ``NDArray::Reorder2DefaultAsync``, which MXNet's library exports, has the
engine undo it.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mxnet.base import _LIB, check_call

from horovod.mxnet.errors import both_kinds, text_of

Finish = Callable[[BaseException | None], None]
"""Says that an operation is over: called once, on any thread, with its error or None."""

Start = Callable[[Finish], None]
"""An operation. Called on a thread of the engine, which it must not block."""

_Pointer = ctypes.c_void_p
_CPU_PRIORITIZED = ctypes.c_int(3)
"""``FnProperty::kCPUPrioritized``: not queued behind the computations, which may occupy all of their threads."""
_EXIT_SECONDS = 30.0


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

try:
    _reorder: Any = _LIB["_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv"]  # mxnet::NDArray::Reorder2DefaultAsync() const
    _reorder.argtypes, _reorder.restype = [_Pointer], None
except AttributeError:  # a build without oneDNN has one layout alone
    _reorder = None


class _Operation:
    """One operation, from the push until the engine forgets it."""

    __slots__ = ("arrays", "error", "on_complete", "start", "thread")

    def __init__(self, start: Start, arrays: Sequence[Any]) -> None:
        self.start = start
        self.arrays = arrays  # the engine keeps their memory, not the handles by which it is found
        self.error: BaseException | None = None
        self.thread = 0
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


@_AsyncFunction  # type: ignore[untyped-decorator]  # as ctypes makes it
def _run(_: int, on_complete: int, number: int) -> None:
    _pushed[number].run(on_complete)


@_Deleter  # type: ignore[untyped-decorator]  # as above
def _forget(number: int) -> None:
    """The engine is done with an operation, which it may never have run: it leaves out what depends on a failed one."""
    _pushed.pop(number, None)
    if not _pushed:
        with _all_gone:
            _all_gone.notify_all()


def push(start: Start, reads: Sequence[Any], writes: Sequence[Any], priority: int, name: str) -> None:
    """Have the engine call ``start(finish)`` when the arrays are free for it, and keep them reserved until ``finish``.

    Args:
        reads, writes: NDArrays in host memory; an array may be in both. Their elements are in the layout of their shape then.
        priority: operations with a higher one start earlier, where several could.
        name: for MXNet's profiler.

    Raises:
        the operation's error, where MXNet's engine runs operations at once (``MXNET_ENGINE_TYPE=NaiveEngine``).
    """
    for array in {id(array): array for array in (*reads, *writes)}.values():
        to_default_layout(array)
    operation = _Operation(start, (*reads, *writes))
    number = next(_numbers)
    writing = {_variable(array): array.handle for array in writes}
    reading = {_variable(array): array.handle for array in reads}
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


def to_default_layout(array: Any) -> None:
    """Have the engine put an array's elements in the order of its shape, if they are in another."""
    if _reorder is not None:
        _reorder(array.handle)


def _variable(array: Any) -> int | None:
    """What identifies an array's engine variable: arrays that are views of one another have the same.

    An operation must name a variable once. It is the address of ``mxnet::NDArray::Chunk``, to which an ``NDArray``'s first
    member points.
    """
    return _Pointer.from_address(array.handle.value).value


def drain(timeout: float | None = None) -> bool:
    """Wait until the engine has forgotten all operations; whether it has."""
    with _all_gone:
        return _all_gone.wait_for(lambda: not _pushed, timeout)


# MXNet stops its engine in a process that is about to fork, and waits for all operations while it keeps Python's lock, which
# ours need. So they are waited for before.
os.register_at_fork(before=drain)

# And nothing of the engine may call into an interpreter that is gone. hvd.shutdown() runs earlier, so nothing waits for peers.
atexit.register(drain, _EXIT_SECONDS)
