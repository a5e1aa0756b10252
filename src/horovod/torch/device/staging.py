"""Staging: collectives on device tensors work on copies in host memory.

A submission is staged if no engine moves the memory of its device, or if that engine lacks the operation or the data type. It
gets a copy in page-locked host memory, an engine for host memory works on the copy, and the result is copied back. Each device
has a :class:`Port`: one stream for copies to the host, one for copies to the device, and a thread that waits for the former.

    caller's stream   ──kernels──┐mark()          ┌───────────── arrive() ──▶ kernels that use the result
    out stream                   └──copies──┐     │
    waiting thread                          └─▶ proceed
    worker thread                                           └─▶ announce, agree, reduce ─▶ end()
    back stream                                                            └──copies──┘

* A submission is announced to the other ranks only when its copy is complete. So a worker thread never waits for a
  device: other submissions overtake a late one, and a rank whose device computes for minutes does not look stuck in a
  collective.
* The worker thread starts the copy back at the end of the collective, which takes it some microseconds. The waiting thread
  does not do it, because it may be waiting for a much later gradient. The directions have separate streams for the same
  reason.
* ``synchronize()`` makes the caller's current stream wait for the copies back. The host waits only for the collective, never
  for the device.
* Memory must not be reused while a stream works on it. Inputs are held until their copy is complete. Outputs are marked with
  ``record_stream``: the caller's tensors for the back stream, tensors made here for the caller's stream.

* All calls for the device are made inside :meth:`Port.chosen`, so none invalidates a capture of a graph on another thread.

Like :mod:`horovod.torch.device.runtime`, it uses the functions of ``torch.cuda``, or those of another kind of device's module.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from horovod.comm.datatypes import Array
from horovod.core.errors import EngineFailureError
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.device.base import refuse_in_capture
from horovod.torch.device.pinned import Buffer, PinnedPool
from horovod.torch.device.runtime import TorchRuntime
from horovod.torch.tensors import DATA_TYPES, check, flat_array

Proceed = Callable[[BaseException | None], None]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources with their targets."""

_ALIGNMENT = 64
_END_SECONDS = 30.0
_LOOK_SECONDS = 1.0

_log = logging.getLogger("horovod.torch")

pool = PinnedPool()


class _Departure(NamedTuple):
    """Copies to the host, complete at the event ``complete`` (None: at once). ``copies`` keeps their memory alive."""

    complete: Any
    copies: Copies
    proceed: Proceed


class Port:
    """Copies between one device and host memory: a stream for each direction, and a thread that waits for copies to the host.

    Any thread may call any method. All but :meth:`drain` and :meth:`close` return at once.

    Attributes:
        chosen: makes a block in which the device is the current one, and in which the thread's calls invalidate no capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)
        self.chosen = TorchRuntime(device).chosen
        self._out = self._module.Stream(device=device)
        self._back = self._module.Stream(device=device)
        self._departures: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"horovod-staging-{device}", daemon=True)
        self._thread.start()

    def mark(self) -> Any:
        """An event at the present point of the caller's current stream.

        Raises:
            ValueError: that stream is being captured into a graph.
        """
        refuse_in_capture(self._module.is_current_stream_capturing())
        return self._module.current_stream(self.device).record_event()

    def leave(self, after: Any, copies: Copies, proceed: Proceed) -> None:
        """Start copies from the device, after the event ``after``. Calls ``proceed`` when they are complete or have failed."""
        with self._on(self._out):
            self._out.wait_event(after)
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            complete = self._module.Event(blocking=True)  # the thread sleeps instead of spinning
            self._out.record_event(complete)
        self._departures.put(_Departure(complete, copies, proceed))

    def enter(self, after: Any, copies: Copies) -> Any:
        """Start copies to the device, after the event ``after``. Returns the event of their completion."""
        with self._on(self._back):
            self._back.wait_event(after)
            for source, target in copies:
                with torch.inference_mode(target.is_inference()):
                    target.copy_(source, non_blocking=True)
                target.record_stream(self._back)
            return self._back.record_event()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the device, for :meth:`enter`."""
        with self._on(self._back):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def follow(self, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Make later work of the caller's current stream, which may use ``tensors``, wait for ``event``.

        Raises:
            ValueError: that stream is being captured into a graph.
        """
        refuse_in_capture(self._module.is_current_stream_capturing())
        stream = self._module.current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def drain(self) -> None:
        """Return when all earlier copies have arrived, however long the device computes.

        Raises:
            HorovodInternalError: the thread that waits for the device has ended, so the copies' completion stays unknown.
        """
        arrived = threading.Event()
        self._departures.put(_Departure(None, [], lambda _: arrived.set()))
        while not arrived.wait(_LOOK_SECONDS):
            if not self._thread.is_alive():
                raise EngineFailureError(f"the thread that waits for {self.device} has ended; see this rank's output")

    def close(self) -> None:
        """Wait until all copies have arrived, 30 seconds at most, and end the thread."""
        self._departures.put(None)
        self._thread.join(_END_SECONDS)

    def reached(self, event: Any) -> bool:
        """Whether all work before an event is done."""
        with self.chosen():
            return bool(event.query())

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        with self.chosen(), self._module.stream(stream):
            yield

    def _wait(self) -> None:
        while (departure := self._departures.get()) is not None:
            error: BaseException | None = None
            try:
                if departure.complete is not None:
                    with self.chosen():
                        departure.complete.synchronize()
            except Exception as failure:
                error = _blocked(self.device, "from", failure)
            try:
                departure.proceed(error)
            except Exception:  # the thread goes on: it waits for other copies, too
                _log.exception("the copy of a tensor from %s could not be submitted", self.device)
            del departure  # it holds memory


class Staged:
    """The tensors of one submission on a device. To operations it is a :class:`horovod.torch.device.base.TorchMemory`, to the
    core a :class:`horovod.core.requests.tensor.Transfer`.

    The copies to the host wait for the work that the caller's current stream was given before this object was made. Later work
    must not change the tensors until :meth:`arrive` has been called.

    Args:
        port: the port of the tensors' device.

    Raises:
        ValueError: the caller's current stream is being captured into a graph.
    """

    device = "gpu"

    def __init__(self, port: Port) -> None:
        self._port = port
        self._submitted = port.mark()
        self._leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._returning: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._grown: list[tuple[torch.Tensor, dict[int, torch.Tensor], int]] = []
        self._buffers: list[Buffer] = []
        self._outputs: list[torch.Tensor] = []
        self._returned: Any = None

    # The interface that operations use: horovod.torch.device.base.TorchMemory.

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        copies = self._host(tensors)
        self._leaving += [(tensor.detach(), copy) for tensor, copy in zip(tensors, copies, strict=True)]
        return self._views(tensors, copies)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        copies = self._host(tensors)
        self._returning += [(copy, tensor.detach()) for tensor, copy in zip(tensors, copies, strict=True)]
        return self._views(tensors, copies)

    def reduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        views = self.read(inputs)  # the copies are reduced in place in any case, as they belong to this object
        self._returning += [(copy, output.detach()) for (_, copy), output in zip(self._leaving, outputs, strict=True)]
        return views, views

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        def allocate(index: int, rows: int) -> Array:
            copy = self._room([(torch.Size((rows, *tensors[index].shape[1:])), tensors[index].dtype)])[0]
            self._grown.append((copy, outputs, index))
            return flat_array(copy)

        return allocate

    def arrive(self, handle: Handle) -> None:
        if self._returned is not None:
            self._port.follow(self._returned, self._outputs)

    def arrived(self, handle: Handle) -> bool:
        return self._returned is None or self._port.reached(self._returned)

    # The interface that the core uses: horovod.core.requests.tensor.Transfer.

    def begin(self, proceed: Proceed) -> None:
        if self._leaving:
            self._port.leave(self._submitted, self._leaving, proceed)
        else:
            proceed(None)

    def end(self, error: BaseException | None) -> BaseException | None:
        buffers, self._buffers, self._leaving = self._buffers, [], []
        if error is not None:
            return error  # the worker thread may still be using the buffers; they are freed when it releases them
        try:
            for copy, outputs, index in self._grown:
                outputs[index] = self._port.empty(copy.shape, copy.dtype)
                self._returning.append((copy, outputs[index]))
            self._outputs = [output for _, output in self._returning]
            self._returned = self._port.enter(self._submitted, self._returning)
        except Exception as failure:
            return _blocked(self._port.device, "to", failure)
        finally:
            self._returning, self._grown = [], []
        for buffer in buffers:
            pool.give(buffer, self._returned)
        return None

    def _host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            check(tensor)
            if tensor.device != self._port.device:
                raise ValueError(
                    f"Tensors in list must be on same device. One is on {self._port.device}, another on {tensor.device}."
                )
        return self._room([(tensor.shape, tensor.dtype) for tensor in tensors])

    def _room(self, wanted: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        """Make tensors of these shapes and types in one page-locked buffer."""
        starts, stop = [], 0
        for shape, dtype in wanted:
            starts.append(stop)
            stop += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self._port.chosen():
            buffer = pool.take(max(stop, 1))
        self._buffers.append(buffer)
        with torch.inference_mode(False):  # the threads that copy are not in inference mode
            return [
                buffer.memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for start, (shape, dtype) in zip(starts, wanted, strict=True)
            ]

    def _views(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[Tensor]:
        return [
            Tensor(flat_array(copy), DATA_TYPES[tensor.dtype], tuple(tensor.shape), self)
            for tensor, copy in zip(tensors, copies, strict=True)
        ]


def _blocked(device: torch.device, way: str, error: BaseException) -> EngineFailureError:
    return EngineFailureError(f"a tensor could not be copied {way} {device}: {type(error).__name__}: {error}")


_ports: dict[torch.device, Port] = {}
_opening = threading.Lock()


def port(device: torch.device) -> Port:
    """The port of a device. The first call for a device opens it."""
    with _opening:
        if device not in _ports:
            _ports[device] = Port(device)
        return _ports[device]


def drain() -> None:
    """Wait until every earlier submission can be announced, because its copy is complete. Raises as :meth:`Port.drain`."""
    for each in list(_ports.values()):
        each.drain()


def close() -> None:
    """Close all ports, and free all idle buffers. A port opens again when it is needed."""
    with _opening:
        ports = list(_ports.values())
        _ports.clear()
    for each in ports:
        each.close()
    pool.clear()


atexit.register(close)  # so that no thread still waits for a device when the interpreter ends
