"""The memory of one eager submission: host memory, or the memory of a GPU if an engine can move it.

An operation calls :func:`memory_of` for its tensors, reads them, allocates the outputs, and takes the results when the handle
is done. Functions in a graph always get host memory (``docs/design/frameworks.md``).

TensorFlow exposes neither its streams nor its events, so on a GPU the host waits. Before the submission, ``to_dlpack`` waits
for all earlier work of the GPU, for inputs and for outputs. After it, ``results`` waits for the collective. Outputs are tensors
of TensorFlow's allocator, and are written before any other code has them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from horovod._bindings.device_tensors import CudaDevices, OnDevice
from horovod._bindings.dlpack import address_in
from horovod._bindings.reductions import ReductionArguments
from horovod.comm.datatypes import COMPLEX, Array
from horovod.comm.spans import Vectors
from horovod.core.lifecycle import context
from horovod.core.requests import devices
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Tensor
from horovod.tensorflow.tensors import DATA_TYPES, HostRoom, view

_GPUS = "device:GPU:"
"""Part of the full name of every device whose memory an engine can move."""
_FIRST_GPU = "GPU:0"

_FAILURE_SECONDS = 10.0
"""How long to wait until the ranks agree which of them failed first."""


class Room(Protocol):
    """Memory for one output.

    Attributes:
        vector: the memory, as ``allocate`` of an operation returns it.
    """

    @property
    def vector(self) -> Array | Vectors: ...

    def described(self) -> Tensor:
        """This memory as a tensor of the core."""

    def tensor(self) -> Any:
        """An eager tensor in this memory. Called after the collective; the core must not write the memory afterwards."""


class TensorFlowMemory(Protocol):
    """The memory of one submission."""

    def read(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The tensors as inputs of the collective."""

    def room(self, like: Any, shape: Sequence[int]) -> Room:
        """Memory for an output of this shape, with the dtype and on the device of ``like``. Any thread may call it."""

    def changed(self, tensor: Any, keeps: bool) -> Room:
        """Memory for a new value of ``tensor``. With ``keeps`` it has the old value, which the collective does not change."""

    def results(self, handle: Handle, rooms: Sequence[Room]) -> list[Any]:
        """Return the outputs as eager tensors. The handle must be done.

        Raises:
            HorovodInternalError: the device did not complete the collective.
        """


class TensorFlowHostMemory:
    """Host memory, which the core reads and writes without a copy. TensorFlow copies tensors on devices to the host."""

    def read(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [view(tensor) for tensor in tensors]

    def room(self, like: Any, shape: Sequence[int]) -> Room:
        return HostRoom(shape, like.dtype)

    def changed(self, tensor: Any, keeps: bool) -> Room:
        made = HostRoom(tensor.shape.as_list(), tensor.dtype)
        if keeps:
            np.copyto(made.vector, view(tensor).array)
        return made

    def results(self, handle: Handle, rooms: Sequence[Room]) -> list[Any]:
        return [room.tensor() for room in rooms]


class TensorFlowDeviceMemory:
    """The memory of a GPU with the tensors of one submission.

    Args:
        tensors: the tensors, on GPUs.
        engine: the engine that moves the memory.

    Raises:
        ValueError: the tensors are on several GPUs, or on another GPU than this rank's earlier collectives.
    """

    def __init__(self, tensors: Sequence[Any], engine: str) -> None:
        addresses = {id(tensor): _address(tensor) for tensor in tensors}
        for first in {
            tensor.backing_device: address for tensor in tensors if (address := addresses[id(tensor)])
        }.values():
            tensorflow_devices.use(first)
        self._runtime = tensorflow_devices.runtime()
        self._submission = OnDevice(self._runtime, engine)
        self._addresses = addresses

    def read(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [self.described(tensor, self._addresses[id(tensor)]) for tensor in tensors]

    def room(self, like: Any, shape: Sequence[int]) -> Room:
        with tf.device(like.backing_device):
            return _DeviceRoom(self, tf.raw_ops.Empty(shape=list(shape), dtype=like.dtype))

    def changed(self, tensor: Any, keeps: bool) -> Room:
        if not keeps:
            return self.room(tensor, tensor.shape.as_list())
        with tf.device(tensor.backing_device):
            return _DeviceRoom(self, tf.identity(tensor))

    def results(self, handle: Handle, rooms: Sequence[Room]) -> list[Any]:
        if handle.event is not None:
            handle.event.wait()
            error = handle.event.error()
            if error is not None:
                reason = f"a collective on {self._runtime.device} was not completed: {error}"
                raise context.current().termination.about_to_fail(_FAILURE_SECONDS, reason)
            self._submission.release()
        return [room.tensor() for room in rooms]

    def described(self, tensor: Any, address: int) -> Tensor:
        shape = tensor.shape.as_list()
        return self._submission.tensor(address, DATA_TYPES[tensor.dtype], shape, owner=tensor)


class _DeviceRoom:
    """A new tensor of TensorFlow that no other code has yet."""

    def __init__(self, memory: TensorFlowDeviceMemory, tensor: Any) -> None:
        self._tensor = tensor
        # This waits for the GPU once more: an earlier use of the memory may still be running.
        self._described = memory.described(tensor, _address(tensor))

    @property
    def vector(self) -> Vectors:
        memory = self._described.device_memory
        assert memory is not None
        return memory

    def described(self) -> Tensor:
        return self._described

    def tensor(self) -> Any:
        return self._tensor


host_memory = TensorFlowHostMemory()

_log = logging.getLogger("horovod.tensorflow")
_warned = False


def tell_of_graphs() -> None:
    """Log once that collectives of graphs do not use the memory of GPUs, if eager ones may."""
    global _warned
    if not _warned and context.is_initialized() and context.current().device_engine:
        _warned = True
        _log.info(
            "collectives in graphs of TensorFlow (tf.function, Keras) travel through host memory; eager ones on GPUs use %s",
            context.current().device_engine,
        )


def memory_of(tensors: Sequence[Any], reduction: ReductionArguments | None = None) -> TensorFlowMemory:
    """The memory for a submission of eager tensors. Ranks whose tensors have the same dtypes and are on the same kind of device
    choose the same kind of memory.

    Args:
        tensors: the inputs of the collective.
        reduction: the reduction; None for a collective that only moves elements.
    """
    if not tensors or _GPUS not in tensors[0].backing_device:
        return host_memory
    data_types = [DATA_TYPES[tensor.dtype] for tensor in tensors]
    engine = tensorflow_devices.engine(data_types, reduction)
    # TensorFlow keeps some types in host memory, even if it names another device.
    if not engine or not all(_GPUS in tensor.backing_device for tensor in tensors):
        return host_memory
    if any(data_type in COMPLEX for data_type in data_types) or not all(map(_has_room, tensors)):
        return host_memory
    return TensorFlowDeviceMemory(tensors, engine)


def _address(tensor: Any) -> int:
    """The address of a tensor's elements, after all earlier work of TensorFlow on the device; 0 if there are none."""
    return address_in(tf.experimental.dlpack.to_dlpack(tensor))


_room: dict[tuple[tf.DType, str], bool] = {}


def _has_room(tensor: Any) -> bool:
    """Whether TensorFlow makes tensors of this type on this device without filling them."""
    key = tensor.dtype, tensor.backing_device
    if key not in _room:
        with tf.device(tensor.backing_device):
            made = tf.raw_ops.Empty(shape=[1], dtype=tensor.dtype)
        _room[key] = made.backing_device == tensor.backing_device
    return _room[key]


def _lacking() -> str:
    if tf.test.is_built_with_cuda():
        return ""
    return "this TensorFlow was built without CUDA: pip install 'tensorflow[and-cuda]'"


def _first() -> tuple[int, object]:
    with tf.device(_FIRST_GPU):
        made = tf.zeros([1])
    return _address(made), made


tensorflow_devices = CudaDevices(_lacking, _first)
devices.provide(tensorflow_devices)
