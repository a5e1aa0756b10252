"""Submits requests to the core through MXNet's engine.

A request is made and checked in the script's thread. The engine submits it when the arrays are ready. The script therefore
continues immediately, computation overlaps with communication, and two requests for the same array run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from horovod.comm.compression.block_reduction import Errors
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.lifecycle import context
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.negotiation.messages import Request, TensorSpec
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import submit_arrays
from horovod.mxnet.ops import dependency_engine
from horovod.mxnet.ops.arrays import check, flat, is_host, on_host, readable, to_devices_of, view, writable


def specs(arrays: Sequence[Any], name: str) -> list[TensorSpec]:
    """The specs of arrays for a request.

    Raises:
        ValueError: as :func:`horovod.mxnet.ops.arrays.check`.
    """
    return [TensorSpec(name, check(array, name), tuple(array.shape)) for array in arrays]


def submit(
    process_set: ProcessSet,
    request: Request,
    reads: Sequence[Any],
    writes: Sequence[Any],
    priority: int = 0,
    errors: Errors = (),
) -> None:
    """Let the engine submit ``request`` when the arrays are ready. Later uses of ``writes`` wait for it, and raise its error.

    Args:
        process_set: the ranks that take part. This rank must be a member.
        request: the checked request.
        reads, writes: an array for each tensor of the request, in host memory. ``reads`` may be ``writes``, or empty.
        priority: the priority in MXNet's engine.
        errors: for error feedback, as of :class:`~horovod.core.requests.batch.Entry`.

    Raises:
        ValueError: this rank is not a member.
        HorovodInternalError: not initialised, or the job has failed.
    """
    generation, set_id = context.running(), process_set.process_set_id
    request = context.worker_of(set_id, request.operation).number(request)  # in the order of the script's calls

    def start(finish: dependency_engine.Finish) -> None:
        if not context.is_initialized() or context.running() is not generation:
            raise HorovodInternalError(SHUT_DOWN)
        sources = [] if reads is writes else [readable(array) for array in reads]
        outputs = [flat(writable(array)) for array in writes]
        inputs = outputs if reads is writes else [flat(array) for array in sources]
        handle = submit_arrays(set_id, request, inputs, outputs, owner=(sources, writes), errors=errors)
        handle.then(lambda: finish(handle.error))

    dependency_engine.push(start, [] if reads is writes else reads, writes, priority, request.name)


@contextmanager
def reading(arrays: Sequence[Any], name: str) -> Iterator[list[Tensor]]:
    """A context in which arrays in host memory are computed and do not change. Yields them as tensors of the core.

    Raises:
        ValueError: as :func:`horovod.mxnet.ops.arrays.check`.
        MXNetError: the computation of one of them has failed.
    """
    with dependency_engine.Reading(arrays, name):
        sources = [readable(array) for array in arrays]
        yield [view(source) for source in sources]
        del sources  # they kept the memory alive until here


def in_place(arrays: Sequence[Any], act: Callable[[list[Any]], None]) -> None:
    """Call ``act`` with the arrays in host memory, for it to write them. Arrays on other devices are copied there and back."""
    hosts = on_host(arrays)
    act(hosts)
    for array, host in zip(arrays, hosts, strict=True):
        if host is not array:
            host.copyto(array)


def to_new(arrays: Sequence[Any], act: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Call ``act`` with the arrays in host memory, and copy its results to the devices of the arrays."""
    if all(map(is_host, arrays)):
        return list(act(list(arrays)))
    return to_devices_of(act(on_host(arrays)), arrays)
