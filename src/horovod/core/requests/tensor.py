"""A tensor as a binding passes it: memory with a type and a shape. The core does not know which framework owns it.

For a tensor on a device whose memory no engine moves, the binding passes host memory for a copy, and a transfer, which says
when the copy is complete and copies the result back. If an engine moves the memory, the binding passes its address, and the
marker of the device's work after which it may be accessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from horovod.comm.datatypes import Array, DataType
from horovod.comm.spans import Spans, Vectors
from horovod.core.requests.devices import DeviceReadiness


class Transfer(Protocol):
    """The copies of one submission from a device to host memory and back. Used once.

    Attributes:
        device: the kind of device, the same on all ranks that agree, for example ``gpu``.
    """

    @property
    def device(self) -> str: ...

    def begin(self, proceed: Callable[[BaseException | None], None]) -> None:
        """Start copying the inputs. Call ``proceed(None)`` once the arrays may be read, or with the reason why they never will.

        Called on the submitter's thread, which it must not block. ``proceed`` may be called at once, or later by any thread. If
        it raises an exception, the submitter gets it; then ``proceed`` must not be called.
        """

    def end(self, error: BaseException | None) -> BaseException | None:
        """Start copying the outputs back when the collective is over, unless it failed with ``error``.

        Called once, on any thread, which it must not block. Returns the error of the submission, or None.
        """


class Tensor(msgspec.Struct, frozen=True):
    """One contiguous tensor.

    Attributes:
        array: its elements as a one-dimensional NumPy view of ``data_type.numpy``; the collective reads or writes it.
        data_type: the type of the elements.
        shape: the shape of the framework's tensor; () for a scalar, which has one element.
        transfer: copies the elements from a device, and back; one for all tensors of a submission.
        device_memory: the memory of elements on a device that an engine moves; ``array`` is empty then.
        ready: when that memory may be accessed; one for all tensors of a submission.
    """

    array: Array
    data_type: DataType
    shape: tuple[int, ...]
    transfer: Transfer | None = None
    device_memory: Spans | None = None
    ready: DeviceReadiness | None = None


Allocate = Callable[[int, int], Array | Vectors]
"""``allocate(index, rows)`` makes output ``index`` with that first dimension, and returns its flat view, or a vector of its
memory on a device; for an alltoall perhaps one vector for each rank. Any thread may call it."""
