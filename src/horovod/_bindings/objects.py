"""Broadcasts and all-gathers of picklable objects, the same in every binding.

If a rank cannot pickle its object, it sends the reason instead, so the call fails on all ranks and none waits. A pickle of
another host is decoded only if its digest proves that a rank of this job has sent it for this call
(:mod:`horovod.core.lifecycle.object_protection`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from horovod._base import pickling
from horovod.comm.datatypes import Array, DataType
from horovod.common.basics import rank
from horovod.core.lifecycle.context import running, worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives
from horovod.core.submission.arguments import full_name, set_id, whole_number
from horovod.observe.call_site import caller

T = TypeVar("T")


class _Failed:
    """Sent instead of an object: the reason why a rank has none.

    Attributes:
        rank: the global rank.
        reason: the exception's type and text, and the line of the script.
    """

    def __init__(self, error: Exception) -> None:
        self.rank = rank()
        try:
            text = str(error)
        except Exception:  # the type alone must do
            text = "an exception without a message"
        self.reason = f"{type(error).__name__}: {text}, at {caller()}"


def _pickled(obj: Any, call: str) -> Array:
    """The pickle, with what proves to the others that it is this rank's for ``call``."""
    buffer = io.BytesIO()
    pickling.dump(obj, buffer)
    with buffer.getbuffer() as view:
        trailer = running().objects.trailer(view, call)
    buffer.seek(0, io.SEEK_END)
    buffer.write(trailer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def _prepared(make: Callable[[], T], call: str) -> tuple[T | None, Array, Exception | None]:
    """The result of ``make``, its pickle, and None. If that fails: None, the pickled reason, and the exception."""
    try:
        obj = make()
        return obj, _pickled(obj, call), None
    except Exception as error:
        return None, _pickled(_Failed(error), call), error


def _loaded(data: Array, sender: int, call: str) -> Any:
    """The object of another rank. Raises EngineFailureError if it is not what that rank has sent."""
    return cloudpickle.loads(running().objects.check(data.data, sender, call))


def _call(what: str, name: str, number: int | None) -> str:
    """Identifies a call on all members of a process set."""
    return f"{what} {name!r}" + (f" of process set {number}" if number else "")


def _name(name: str | None) -> str:
    """``name`` of a call, or the default. Raises as :func:`horovod.core.submission.arguments.full_name`."""
    return full_name("", name)[1:] or "object"


def _raise_others(what: str, objects: Sequence[Any]) -> None:
    """Raise RuntimeError if one of the received objects is a :class:`_Failed`."""
    failed = [each for each in objects if isinstance(each, _Failed)]
    if failed:
        reasons = "; ".join(f"rank {each.rank} failed with {each.reason}" for each in failed)
        raise RuntimeError(f"{what} failed on all ranks, because a rank could not prepare what it sends: {reasons}")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast the object of ``root_rank`` to all members of ``process_set``. Every member must call it.

    Args:
        obj: any object that cloudpickle can pickle. Only that of the root is used.
        root_rank: the global rank whose object is sent. It must be a member of the set.
        name: identifies the call. Calls without a name are matched by their order.
        process_set: the ranks that take part. This rank must be a member.

    Returns:
        On the root ``obj`` itself, elsewhere a copy.

    Raises:
        TypeError, ValueError: an argument is wrong; the root or this rank is not a member of the set.
        RuntimeError: the root's object cannot be pickled; the message has the reason. The root raises the exception itself.
        HorovodInternalError: not initialised, the ranks disagree, or the job has failed.
    """
    return broadcast_made(lambda: obj, root_rank, name, process_set)


def broadcast_made(
    make: Callable[[], Any],
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    what: str = "broadcast_object",
) -> Any:
    """Like :func:`broadcast_object`, of the result of ``make``, which only the root calls. If it raises, all ranks raise.

    Args:
        what: the function that the script called, for the error.
    """
    name, number, root = _name(name), set_id(process_set), whole_number(root_rank, "root_rank")

    def broadcast(array: Array, data_type: DataType, label: str) -> None:
        tensors = [Tensor(array, data_type, array.shape)]
        collectives.broadcast("broadcast", f"{name}.{label}", tensors, root, number, awaited=True).wait()

    call = _call("broadcast_object", name, number)
    obj, data, error = _prepared(make, call) if rank() == root else (None, None, None)
    length = np.array([0 if data is None else data.size], np.int64)
    broadcast(length, DataType.INT64, "sz")
    if data is None:
        data = np.empty(int(length[0]), np.uint8)
    broadcast(data, DataType.UINT8, "t")
    if error is not None:
        raise error
    if rank() != root:
        obj = _loaded(data, root, call)
        _raise_others(f"{what} from root rank {root}", [obj])
    return obj


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All-gather the objects of all members of ``process_set``. Every member must call it.

    Args:
        obj: any object that cloudpickle can pickle. Types and sizes may differ between ranks.
        name: identifies the call. Calls without a name are matched by their order.
        process_set: the ranks that take part. This rank must be a member.

    Returns:
        A list of the objects in rank order. A rank that has joined (``hvd.join()``) has no object in it.

    Raises:
        TypeError, ValueError: an argument is wrong, or this rank is not a member of the set.
        RuntimeError: another rank's object cannot be pickled; the message has the reason. That rank raises the exception
            itself.
        HorovodInternalError: not initialised, the ranks disagree, or the job has failed.
    """
    return allgather_made(lambda: obj, name, process_set)


def allgather_made(
    make: Callable[[], Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    what: str = "allgather_object",
) -> list[Any]:
    """Like :func:`allgather_object`, of the result of ``make``. If it raises on one rank, all ranks raise.

    Args:
        what: the function that the script called, for the error.
    """
    name, number = _name(name), set_id(process_set)
    call = _call("allgather_object", name, number)
    _, data, error = _prepared(make, call)
    gathered: list[Array] = []

    def allocate(_: int, rows: int) -> Array:
        gathered.append(np.empty(rows, np.uint8))
        return gathered[0]

    tensors = [Tensor(data, DataType.UINT8, data.shape)]
    handle = collectives.allgather("allgather", f"{name}.t", tensors, allocate, number, awaited=True)
    handle.wait()
    if error is not None:
        raise error
    objects, start = [], 0
    for sender, length in zip(worker_of(number, Operation.ALLGATHER).ranks, handle.result[0], strict=True):
        if length:  # a rank that has joined has length 0; no pickle has
            objects.append(_loaded(gathered[0][start : start + length], sender, call))
            start += length
    _raise_others(what, objects)
    return objects
