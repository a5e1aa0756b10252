"""The integer handles of asynchronous calls: ``poll`` and ``synchronize``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from horovod.core.requests.handle import Handle
from horovod.torch.device.base import TorchMemory
from horovod.torch.uncompiled import uncompiled


class Started(msgspec.Struct, gc=False):
    """A collective that was started.

    Attributes:
        memory: the memory of its tensors; None for host memory, which has the output once the collective is done.
        output: the output, if it is known beforehand.
        make: makes the output, if it is only known when the collective is done.
    """

    handle: Handle
    memory: TorchMemory | None = None
    output: Any = None
    make: Callable[[Handle], Any] | None = None

    def result(self) -> Any:
        """Wait for it, and return its output. Raises HorovodInternalError if it failed."""
        self.handle.wait()
        if self.memory is not None:
            self.memory.arrive(self.handle)
        return self.output if self.make is None else self.make(self.handle)


_numbers = itertools.count(1)
_last = 0
_open: dict[int, Started] = {}


def register(started: Started) -> int:
    """Give a collective an integer handle, and return it. :func:`synchronize` returns its result."""
    global _last
    _last = number = next(_numbers)
    _open[number] = started
    return number


def clear() -> None:
    """Forget all handles, for ``init()`` and ``shutdown()``. Numbers are not used again, so an old handle is not valid."""
    _open.clear()


@uncompiled
def poll(handle: int) -> bool:
    """Whether the collective is complete and, on a device, its output is there, so that :func:`synchronize` returns at once.

    Does not wait, and communicates nothing. Other ranks need not call it.

    Args:
        handle: the return value of a function whose name contains ``_async``.

    Raises:
        ValueError: there is no such handle, or its output was returned already.
    """
    try:
        known = _open[handle]
    except KeyError:
        raise ValueError(f"Handle {handle} was not created or has been cleared.") from None
    if not known.handle.done():
        known.handle.leave_to_worker()
        return False
    return known.memory is None or known.memory.arrived(known.handle)


@uncompiled
def synchronize(handle: int) -> Any:
    """Wait for a collective, and return its output. Returns None for a handle whose output was returned before.

    With tensors on a device it does not wait for the device: later work of the current stream comes after the output is
    there. Another stream must be made to wait for the current one.

    Args:
        handle: the return value of a function whose name contains ``_async``.

    Raises:
        HorovodInternalError: the collective failed. The text names the ranks, the tensor and the lines.
        ValueError: there was never such a handle, or the current stream is being captured into a CUDA graph.
    """
    known = _open.get(handle)
    if known is None:
        if not isinstance(handle, int) or not 0 < handle <= _last:
            raise ValueError(f"Handle {handle!r} was not created.")
        return None
    try:
        result = known.result()
    except BaseException as error:
        if type(error) is type(
            known.handle.error
        ):  # otherwise something interrupted the wait, and the script may call this again
            _open.pop(handle, None)
        raise
    _open.pop(handle, None)
    return result
