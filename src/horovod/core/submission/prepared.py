"""Submits checked requests, and keeps those that a training step submits again and again.

A :class:`Prepared` collective is made once for an operation, a name, a layout and parameters. It is submitted many times with
nothing but the addresses of its tensors. The ranks announce one request object in full once, and as a small integer afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import msgspec

from horovod.comm.spans import Layout, Spans, Vectors, joined
from horovod.core.lifecycle.context import worker_of
from horovod.core.negotiation.messages import HOST, Request
from horovod.core.requests.batch import Entry
from horovod.core.requests.devices import DeviceReadiness, members_of, of_members
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor, Transfer
from horovod.core.worker.worker import WorkerThread


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

    def at(self, addresses: Sequence[int]) -> Spans:
        """The tensors of the layout at ``addresses``; the same object as the last time while the addresses are the same."""
        spans = self._spans
        if spans is not None and spans.addresses == addresses:
            return spans
        assert self.layout is not None
        spans = self._spans = Spans(self.layout, addresses)
        return spans

    def submit(
        self,
        process_set_id: int | None,
        inputs: Vectors,
        outputs: Vectors,
        awaited: bool = False,
        owner: object = None,
    ) -> Handle:
        """Submit it for these vectors in host memory; see :func:`submit_arrays`."""
        handle = Handle()  # as submit_arrays() does; a call less for each tensor of a burst
        request = self.request
        worker = worker_of(process_set_id, request.operation)
        worker.submit(Entry(request, inputs, outputs, None, handle, time.monotonic(), owner), False, awaited)
        return handle


_CAPACITY = 4096

_by_name: dict[Hashable, Prepared] = {}


def recall(name: Hashable, key: object) -> Prepared | None:
    """The prepared collective of the last call by this name, if it was made of the same ``key``.

    Calls without a name may be remembered by their keys.
    """
    found = _by_name.get(name)
    return found if found is not None and found.key == key else None


def remember(name: Hashable, prepared: Prepared) -> Prepared:
    """Keep a prepared collective for :func:`recall` instead of an older one of that name. Returns it.

    A script that never repeats a name fills the table; then the table is emptied.
    """
    if len(_by_name) >= _CAPACITY:
        _by_name.clear()
    _by_name[name] = prepared
    return prepared


def submit_arrays(
    process_set_id: int | None,
    request: Request,
    inputs: Vectors,
    outputs: Vectors,
    allocate: Allocate | None = None,
    awaited: bool = False,
    owner: object = None,
) -> Handle:
    """Submit a checked request for host memory: one flat vector for each of the request's tensors, of its type and size.

    Args:
        awaited: the calling thread waits for the handle next.
        owner: an object that keeps the vectors' memory alive. It is held until the handle is done.

    Raises:
        ValueError: the name is in flight, or this rank is not a member of the process set.
        HorovodInternalError: the job has failed or was shut down.
    """
    worker = worker_of(process_set_id, request.operation)
    return _submit_arrays(worker, request, inputs, outputs, allocate, awaited, owner)


def _submit_arrays(
    worker: WorkerThread,
    request: Request,
    inputs: Vectors,
    outputs: Vectors,
    allocate: Allocate | None,
    awaited: bool,
    owner: object = None,
) -> Handle:
    handle = Handle()
    worker.submit(Entry(request, inputs, outputs, allocate, handle, time.monotonic(), owner), awaited=awaited)
    return handle


def submit(
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    allocate: Allocate | None = None,
    awaited: bool = False,
) -> Handle:
    """Submit a checked request for tensors, also on a device or being copied from one. Raises as :func:`submit_arrays`."""
    worker = worker_of(process_set_id, request.operation)
    return submit_to(worker, process_set_id, request, inputs, outputs, allocate, awaited)


def submit_to(
    worker: WorkerThread,
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    allocate: Allocate | None = None,
    awaited: bool = False,
) -> Handle:
    """:func:`submit` if the worker of the process set is known already."""
    first = (inputs or outputs)[:1]
    if first and first[0].ready is not None:
        return _submit_on_device(worker, process_set_id, request, inputs, outputs, allocate, first[0].ready)
    transfer = _transfer(inputs or outputs)
    arrays = [tensor.array for tensor in inputs]
    targets = arrays if outputs is inputs else [tensor.array for tensor in outputs]
    if transfer is None:
        return _submit_arrays(worker, request, arrays, targets, allocate, awaited)
    handle = Handle(transfer.end)
    entry = Entry(request, arrays, targets, allocate, handle, time.monotonic())
    try:
        worker.submit(entry, held=True)
        transfer.begin(partial(worker.release, entry))
    except BaseException:
        worker.withdraw(entry)
        raise
    return handle


def _submit_on_device(
    worker: WorkerThread,
    process_set_id: int | None,
    request: Request,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    allocate: Allocate | None,
    ready: DeviceReadiness,
) -> Handle:
    """Submit a request for device memory that an engine moves. The coordinator of all ranks gets those of all process sets."""
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
    if tensors and tensors[0].ready is not None:
        return tensors[0].ready.device
    transfer = _transfer(tensors)
    return HOST if transfer is None else transfer.device


def _transfer(tensors: Sequence[Tensor]) -> Transfer | None:
    return tensors[0].transfer if tensors else None
