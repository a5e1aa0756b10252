"""A request and the arrays it is about, from the script through MXNet's engine to the core.

The request is made in the script's thread, with its name and the line, and what can be found wrong there is raised there. It is
submitted when the engine says that the arrays are ready. So the script runs ahead, an array's computation overlaps with the
communication of others, and two requests for one array come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from horovod.core.coordination.messages import Request, TensorSpec
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.lifecycle import context
from horovod.core.process_set import ProcessSet
from horovod.core.submission.collectives import submit_arrays
from horovod.core.submission.tensor import Tensor
from horovod.mxnet.ops import engine
from horovod.mxnet.ops.arrays import back, check, flat, is_host, on_host, readable, view, writable


def specs(arrays: Sequence[Any], name: str) -> list[TensorSpec]:
    """The arrays as the makers of requests want them.

    Raises:
        ValueError: as :func:`horovod.mxnet.ops.arrays.check`.
    """
    return [TensorSpec(name, check(array, name), tuple(array.shape)) for array in arrays]


def submit(
    process_set: ProcessSet, request: Request, reads: Sequence[Any], writes: Sequence[Any], priority: int = 0
) -> None:
    """Have the engine submit ``request`` when the arrays are ready. Whoever uses ``writes`` waits for it, and gets its error.

    Args:
        reads, writes: one for each of the request's tensors, all in host memory. ``reads`` may be ``writes``, or empty.
    """
    generation, set_id = context.running(), process_set.process_set_id

    def start(finish: engine.Finish) -> None:
        if not context.is_initialized() or context.running() is not generation:
            raise HorovodInternalError(SHUT_DOWN)
        sources = [] if reads is writes else [readable(array) for array in reads]
        outputs = [flat(writable(array)) for array in writes]
        inputs = outputs if reads is writes else [flat(array) for array in sources]
        handle = submit_arrays(set_id, request, inputs, outputs, owner=(sources, writes))
        handle.then(lambda: finish(handle.error))

    engine.push(start, [] if reads is writes else reads, writes, priority, request.name)


@contextmanager
def reading(arrays: Sequence[Any], name: str) -> Iterator[list[Tensor]]:
    """A block in which arrays in host memory are computed, and stay as they are: what the core is to know of them.

    Raises:
        ValueError: as :func:`horovod.mxnet.ops.arrays.check`.
        MXNetError: the computation of one of them has failed.
    """
    with engine.Reading(arrays, name):
        sources = [readable(array) for array in arrays]
        yield [view(source) for source in sources]
        del sources  # which hold what the views show


def in_place(arrays: Sequence[Any], act: Callable[[list[Any]], None]) -> None:
    """Let ``act`` write arrays: as they are in host memory, or copies of them there that the engine copies back."""
    hosts = on_host(arrays)
    act(hosts)
    for array, host in zip(arrays, hosts, strict=True):
        if host is not array:
            host.copyto(array)


def to_new(arrays: Sequence[Any], act: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """What ``act`` makes of the arrays in host memory, moved to where the arrays are."""
    if all(map(is_host, arrays)):
        return list(act(list(arrays)))
    return back(act(on_host(arrays)), arrays)
