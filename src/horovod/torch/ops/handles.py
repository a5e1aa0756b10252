"""The integer handles of the asynchronous calls, and what becomes of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from horovod.core.submission.handle import Handle, drive_by
from horovod.torch.device.memory import Memory
from horovod.torch.uncompiled import drive

drive_by(drive)  # so no wait for a collective is compiled


class _Open(msgspec.Struct, gc=False):
    """A collective that nobody has fetched the result of; attributes as :func:`register` has them."""

    promise: Handle
    memory: Memory
    output: Any
    make: Callable[[Handle], Any] | None


_numbers = itertools.count(1)
_last = 0
_open: dict[int, _Open] = {}


def register(handle: Handle, memory: Memory, output: Any = None, make: Callable[[Handle], Any] | None = None) -> int:
    """Give a collective on tensors in ``memory`` a number.

    Args:
        output: what :func:`synchronize` returns.
        make: makes it, where it is only known when the handle is done.
    """
    global _last
    _last = number = next(_numbers)
    _open[number] = _Open(handle, memory, output, make)
    return number


def clear() -> None:
    """Forget all handles, as ``init()`` and ``shutdown()`` do. Numbers go on, so an old handle is never taken for a new one."""
    _open.clear()


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return at once, with the result where it belongs, on a device too.

    Raises:
        ValueError: no such handle was given out, or its result was fetched already.
    """
    try:
        known = _open[handle]
    except KeyError:
        raise ValueError(f"Handle {handle} was not created or has been cleared.") from None
    if not known.promise.done():
        known.promise.leave_to_worker()
        return False
    return known.memory.arrived(known.promise)


def synchronize(handle: int) -> Any:
    """Wait for a collective and return its output; None for a handle whose output was fetched before.

    With tensors on a device it does not wait for the device: what the current stream does from now on comes after the
    arrival of the output. Another stream must be made to wait for this one.

    Raises:
        HorovodInternalError: it failed; the text names the ranks, the tensor and the lines.
        ValueError: no such handle was ever given out.
    """
    known = _open.get(handle)
    if known is None:
        if not isinstance(handle, int) or not 0 < handle <= _last:
            raise ValueError(f"Handle {handle!r} was not created.")
        return None
    promise = known.promise
    try:
        promise.wait()
    except BaseException as error:
        failed = type(error) is type(promise.error)
        if failed:  # else something interrupted the wait, which can be taken up again
            _open.pop(handle, None)
        raise
    _open.pop(handle, None)
    known.memory.arrive(promise)
    return known.output if known.make is None else known.make(promise)
