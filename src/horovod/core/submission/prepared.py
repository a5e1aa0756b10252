"""Submits checked requests, and recognises those that a training step submits again and again.

A :class:`Prepared` collective is made once for an operation, a name, a layout and parameters. It is submitted many times with
nothing but the addresses of its tensors. The ranks announce one request object in full once, and as a small integer afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import msgspec

from horovod.comm.compression.block_reduction import Errors, new_errors
from horovod.comm.datatypes import Array
from horovod.comm.spans import Layout, Spans, Vectors, joined
from horovod.core.lifecycle.context import worker_of
from horovod.core.negotiation.messages import HOST, Request
from horovod.core.requests.batch import Entry
from horovod.core.requests.devices import DeviceReadiness, engine_of, members_of, of_members
from horovod.core.requests.handle import End, Handle
from horovod.core.requests.tensor import Allocate, Tensor, Transfer


class Prepared(msgspec.Struct, eq=False, gc=False):
    """A collective that is submitted many times.

    Attributes:
        key: everything that the request was made of. A call with an equal key uses the same prepared collective.
        request: the checked request.
        layout: the types and sizes of the tensors, if all lie in host memory and have one type; None otherwise.
    """

    key: Any
    request: Request
    layout: Layout | None = None
    _spans: Spans | None = None
    _arrays: Sequence[Array] | None = None  # of the spans
    _errors: Errors = ()

    def at(self, addresses: Sequence[int]) -> Spans:
        """The tensors of the layout at ``addresses``; the same object as the last time while the addresses are the same."""
        spans = self._spans
        if spans is not None and spans.addresses == addresses:
            return spans
        assert self.layout is not None
        spans = self._spans = Spans(self.layout, addresses)
        self._arrays = None
        return spans

    def arrays_at(self, addresses: Sequence[int]) -> Sequence[Array]:
        """The same as arrays, which do not keep the memory alive: the same ones while the addresses are the same."""
        spans = self.at(addresses)
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = spans.arrays()
        return arrays

    def compresses(self, process_set_id: int | None) -> bool:
        """Whether these ranks compress some of its tensors."""
        request = self.request
        if not request.compression or engine_of(request.device):
            return False
        return worker_of(process_set_id, request.operation).executor.compresses

    def errors(self, process_set_id: int | None) -> Errors:
        """The memory for error feedback, kept from repetition to repetition of this call; empty if these ranks do not
        compress."""
        request = self.request
        if not self.compresses(process_set_id):
            return ()
        if not self._errors:
            self._errors = new_errors((each.data_type, prod(each.shape)) for each in request.tensors)
        return self._errors

    def submit(
        self,
        process_set_id: int | None,
        inputs: Vectors,
        outputs: Vectors,
        awaited: bool = False,
        owner: object = None,
        errors: Errors = (),
    ) -> Handle:
        """Submit it for these vectors in host memory; see :func:`submit_arrays`."""
        handle = Handle()  # as submit_arrays() does; a call less for each tensor of a burst
        request = self.request
        worker = worker_of(process_set_id, request.operation)
        entry = Entry(request, inputs, outputs, None, handle, time.monotonic(), owner, errors=errors)
        worker.submit(entry, False, awaited)
        return handle


_ARRAY = attrgetter("array")
_CAPACITY = 4096

known: dict[Hashable, Prepared] = {}
"""The prepared collectives, by place: see :func:`recall`."""


def recall(place: Hashable, key: object) -> Prepared | None:
    """The prepared collective of the last call at this place, if it was made of the same ``key``.

    Args:
        place: the name of a call; of a call without a name, its key.
    """
    found = known.get(place)
    return found if found is not None and found.key == key else None


def remember(place: Hashable, prepared: Prepared) -> Prepared:
    """Keep a prepared collective for :func:`recall` instead of an older one of that place. Returns it.

    A script that never repeats a name fills the table; then the table is emptied.
    """
    if len(known) >= _CAPACITY:
        known.clear()
    known[place] = prepared
    return prepared


def submit_arrays(
    process_set_id: int | None,
    request: Request,
    inputs: Vectors,
    outputs: Vectors,
    allocate: Allocate | None = None,
    awaited: bool = False,
    owner: object = None,
    errors: Errors = (),
) -> Handle:
    """Submit a checked request for host memory: one flat vector for each of the request's tensors, of its type and size.

    Args:
        awaited: the calling thread waits for the handle next.
        owner: an object that keeps the vectors' memory alive. It is held until the handle is done.
        errors: as of :class:`~horovod.core.requests.batch.Entry`.

    Raises:
        ValueError: the name is in flight, or this rank is not a member of the process set.
        HorovodInternalError: the job has failed or was shut down.
    """
    handle = Handle()
    worker = worker_of(process_set_id, request.operation)
    entry = Entry(request, inputs, outputs, allocate, handle, time.monotonic(), owner, errors=errors)
    worker.submit(entry, False, awaited)
    return handle


def submit(
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    allocate: Allocate | None = None,
    awaited: bool = False,
    errors: Errors = (),
    end: End | None = None,
) -> Handle:
    """Submit a checked request for tensors, also on a device or being copied from one. Raises as :func:`submit_arrays`.

    Args:
        end: as of :class:`~horovod.core.requests.handle.Handle`. For host memory only.
    """
    first = next(iter(inputs or outputs), None)
    if first is not None and first.ready is not None:
        return _submit_on_device(process_set_id, request, inputs, outputs, allocate, first.ready)
    arrays = [*map(_ARRAY, inputs)]
    targets = arrays if outputs is inputs else [*map(_ARRAY, outputs)]
    transfer = None if first is None else first.transfer
    handle = Handle(end if transfer is None else transfer.end)
    worker = worker_of(process_set_id, request.operation)
    entry = Entry(request, arrays, targets, allocate, handle, time.monotonic(), errors=errors)
    if transfer is None:
        worker.submit(entry, False, awaited)
        return handle
    try:
        worker.submit(entry, held=True)
        transfer.begin(partial(worker.release, entry))
    except BaseException:
        worker.withdraw(entry)
        raise
    return handle


def _submit_on_device(
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    allocate: Allocate | None,
    ready: DeviceReadiness,
) -> Handle:
    """Submit a request for device memory that an engine moves. The coordinator of all ranks gets those of all process sets."""
    worker = worker_of(process_set_id, request.operation)
    members = members_of(worker.ranks, process_set_id)
    if members:
        request = of_members(request, members, worker.registration)
    sources: Vectors = _device_memory(inputs)
    targets = sources if outputs is inputs else _device_memory(outputs)
    handle = Handle()
    entry = Entry(request, sources, targets, allocate, handle, time.monotonic(), ready.held, ready=ready.marker)
    worker_of(0, request.operation).submit(entry)
    return handle


def _device_memory(tensors: Sequence[Tensor]) -> Vectors:
    memory = [tensor.device_memory for tensor in tensors if tensor.device_memory is not None]
    return joined(memory) if memory else []


def device_of(tensors: Sequence[Tensor]) -> str:
    """The kind of device that the tensors lie on."""
    for tensor in tensors[:1]:
        where: DeviceReadiness | Transfer | None = tensor.ready or tensor.transfer
        if where is not None:
            return where.device
    return HOST
