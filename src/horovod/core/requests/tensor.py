"""A tensor as a binding passes it: memory with a type and a shape. The core does not know which framework owns it.

Where a tensor lies on a device whose memory no engine moves, the binding hands over a copy in host memory that is still to
come, and a transfer, which tells when it has come and takes the result back. Where an engine moves it, the binding hands over
where it lies, and the marker of the device's work after which it may be touched.
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

        Called on the submitter's thread, which it must not block. ``proceed`` may be called at once, or later by any thread.
        What it raises, the submitter gets; then ``proceed`` must not be called.
        """

    def end(self, error: BaseException | None) -> BaseException | None:
        """The collective is over: start copying the outputs back, unless it failed with ``error``.

        Called once, on any thread, which it must not block. Returns what the submission fails with, or None.
        """


class Tensor(msgspec.Struct, frozen=True):
    """One contiguous tensor.

    Attributes:
        array: its elements as a one-dimensional NumPy view of ``data_type.numpy``; the collective reads or writes it.
        data_type: of the elements.
        shape: as the framework has it; () for a scalar, which has one element.
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
memory on a device. Any thread may call it."""
