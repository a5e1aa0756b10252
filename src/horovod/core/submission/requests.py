"""Makes requests: names them, checks everything that can be checked on one rank, and refuses requests that cannot be sent.

Everything here runs in the thread that calls a collective, before anything is sent. A request that is refused fails that call
on that rank, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.comm.adasum import can_combine
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import OF_BITS, ReduceOp, can_fold, can_scale
from horovod.core.negotiation.messages import HOST, UNNAMED, Operation, Request, TensorSpec, encode
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.arguments import full_name, real_number, whole_number
from horovod.core.submission.prepared import Prepared, recall, remember
from horovod.observe.call_site import caller

Described = tuple[str, DataType, tuple[int, ...]]
"""A tensor's name, type and shape."""

LONGEST_REQUEST = 8 << 20
"""The largest size of one encoded request, in bytes. One control message may hold eight of them."""


def allreduce_request(
    name: str,
    tensors: Sequence[Described],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    line: str = "",
    transient: bool = False,
    device: str = HOST,
) -> Request:
    """The request of an allreduce of one or more tensors (name, type, shape), for :func:`submit`.

    Args:
        device: the kind of device that the tensors lie on.

    Raises:
        TypeError, ValueError: the operation has no meaning for a tensor's type, or the request cannot be sent.
    """
    return _allreduce(name, tensors, op, *factors(prescale, postscale), line, device, transient)


def _allreduce(
    name: str,
    tensors: Sequence[Described],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    line: str,
    device: str,
    transient: bool = False,
    unnamed: bool = False,
    alike: str = "",
) -> Request:
    """The same, of finite factors.

    Args:
        alike: as of :class:`~horovod.core.negotiation.messages.Request`.
    """
    called = [(name.partition(UNNAMED)[0] if unnamed else each, data_type) for each, data_type, _ in tensors]
    check_reduction("Allreduce", called, op, prescale, postscale)
    specs = tuple(TensorSpec(each, data_type, shape) for each, data_type, shape in tensors)
    operation = Operation.ADASUM if op == ReduceOp.ADASUM else Operation.ALLREDUCE
    return sendable(
        Request(
            operation,
            name,
            specs,
            op,
            prescale,
            postscale,
            device=device,
            caller=line,
            transient=transient,
            unnamed=unnamed,
            alike=alike,
        )
    )


def allreduce_call(
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    device: str = HOST,
) -> Request:
    """The request of one call of ``allreduce``. Only the tensors' types and shapes are used.

    A call with a name gets the request of the last call of that name, if its arguments are the same.

    Raises:
        ValueError: the operation has no meaning for a tensor's type.
    """
    called, line = full_name(prefix, name), caller()
    prescale, postscale = factors(prescale, postscale)
    if called:
        return prepared_allreduce(called, _described(called, tensors), op, prescale, postscale, line, device).request
    called = prefix + UNNAMED
    return _allreduce(called, _described(called, tensors), op, prescale, postscale, line, device, True, unnamed=True)


def prepared_allreduce(
    name: str,
    tensors: Sequence[Described],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    line: str,
    device: str = HOST,
    alike: str = "",
) -> Prepared:
    """The prepared collective of the last call with these arguments; made like :func:`allreduce_request` if there is none.

    Args:
        tensors: must not be changed afterwards.
        prescale, postscale: finite floats.
        alike: as of :class:`~horovod.core.negotiation.messages.Request`.
    """
    key = (tensors, op, prescale, postscale, line, device, alike)
    prepared = recall(name, key)
    if prepared is None:
        request = _allreduce(name, tensors, op, prescale, postscale, line, device, alike=alike)
        prepared = remember(name, Prepared(key, request))
    return prepared


def _described(name: str, tensors: Sequence[Tensor | TensorSpec]) -> list[Described]:
    return [(label, tensor.data_type, tensor.shape) for label, tensor in labelled(name, tensors)]


def broadcast_call(
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    root: int,
    ranks: Sequence[int],
    device: str = HOST,
) -> Request:
    """The request of one call of ``broadcast``, to be submitted later. Only the tensors' types and shapes are used.

    Args:
        ranks: the members of the process set.

    Raises:
        ValueError: the root is not one of them.
    """
    called, root = full_name(prefix, name) or prefix, whole_number(root, "root_rank")
    if root not in ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root} for provided process set: {called!r} can come from "
            f"ranks {list(ranks)}"
        )
    return make_request(Operation.BROADCAST, prefix, name, tensors, root=root, device=device)


def labelled(name: str, tensors: Sequence[Tensor | TensorSpec]) -> list[tuple[str, Tensor | TensorSpec]]:
    """Each tensor with its name: that of the request if it is alone, ``<name>_<i>of<n>`` in a group."""
    if len(tensors) == 1:
        return [(name, tensors[0])]
    return [(f"{name}_{number}of{len(tensors)}", tensor) for number, tensor in enumerate(tensors, 1)]


def make_request(
    operation: Operation,
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    reduce_op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
    splits: tuple[int, ...] = (),
    device: str = HOST,
) -> Request:
    """The request of one call: named, described and checked for being sendable. Parameters are the caller's to check.

    A call with a name gets the request of the last call of that name, if they are the same.
    """
    given = full_name(prefix, name)
    called = given or prefix + UNNAMED
    specs = tuple(TensorSpec(label, each.data_type, each.shape) for label, each in labelled(called, tensors))
    request = Request(
        operation,
        called,
        specs,
        reduce_op,
        prescale,
        postscale,
        root,
        splits,
        device,
        caller=caller(),
        transient=not given,
        unnamed=not given,
    )
    if not given:
        return sendable(request)
    prepared = recall(called, request) or remember(called, Prepared(request, sendable(request)))
    return prepared.request


def factors(prescale: float, postscale: float) -> tuple[float, float]:
    """Both factors as finite floats. Raises as :func:`~horovod.core.submission.arguments.real_number`."""
    return real_number(prescale, "prescale_factor"), real_number(postscale, "postscale_factor")


def sendable(request: Request) -> Request:
    """``request`` itself. A request that could not be sent would fail the worker thread, and with it the whole job.

    Raises:
        TypeError, ValueError: a value is not of a plain type, or the request is too long.
    """
    try:
        length = len(encode(request))
    except OverflowError as error:
        raise ValueError(f"{request.operation.name.capitalize()} of {request.name!r}: {error}") from None
    if length > LONGEST_REQUEST:
        raise ValueError(
            f"{request.operation.name.capitalize()} of {request.name[:100]!r}: to describe its {len(request.tensors)} tensors "
            f"takes {length} bytes; {LONGEST_REQUEST} can be sent. Use several smaller groups, or a shorter name."
        )
    return request


def check_reduction(
    operation: str, tensors: Sequence[tuple[str, DataType]], op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Raise ValueError if ``op`` or the factors have no meaning for one of the tensors (name and type)."""
    scaled = op == ReduceOp.AVERAGE or prescale != 1.0 or postscale != 1.0
    for name, data_type in tensors:
        if op == ReduceOp.ADASUM and not can_combine(data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be reduced with Adasum; it takes "
                "floating-point types only"
            )
        if op in OF_BITS and not can_fold(op, data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be reduced with {op.label}; it takes "
                "integers and bools"
            )
        if not can_fold(op, data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be reduced with {op.label}; use Sum or "
                "Average, or reduce their real and imaginary parts by themselves"
            )
        if scaled and not can_scale(data_type):
            raise ValueError(
                f"{operation} of {name!r}: elements of type {data_type.label} cannot be averaged or scaled; use Sum, Min or Max"
            )
