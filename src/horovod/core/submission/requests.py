"""Makes requests: recognises the calls that were made before, and checks, names and describes the others.

Everything here runs in the thread that calls a collective, before anything is sent. A request that is refused fails that call
on that rank, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter

from horovod.comm.adasum import can_combine
from horovod.comm.compression.blocks import can_compress
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import OF_BITS, ReduceOp, can_fold, can_scale
from horovod.core.negotiation.messages import HOST, UNNAMED, Operation, Request, TensorSpec, encode
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.arguments import full_name, real_number, whole_number
from horovod.core.submission.prepared import Prepared, known, remember
from horovod.observe.call_site import caller

LONGEST_REQUEST = 8 << 20
"""The largest size of one encoded request, in bytes. One control message may hold eight of them."""

_TYPE_AND_SHAPE = attrgetter("data_type", "shape")
_REDUCING = {Operation.ALLREDUCE: "Allreduce", Operation.ADASUM: "Allreduce", Operation.REDUCESCATTER: "Reducescatter"}


def prepared_call(
    operation: Operation,
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
    splits: Sequence[int] = (),
    device: str = HOST,
    line: str | None = None,
    labels: Sequence[str] = (),
    alike: str = "",
    compression: str = "",
) -> Prepared:
    """The prepared collective of one call: that of the last call with the same arguments, or a new one.

    A call with a name is recognised by its name, one without by everything else. Only the tensors' types and shapes are used.

    Args:
        prefix, name: ``<prefix>.<name>`` identifies the call; without a prefix, ``name`` does. Without a name, the calls of a
            prefix are counted.
        prescale, postscale: finite floats.
        device: the kind of device that the tensors lie on.
        line: the line of the user's script; None for the one that has led to this call.
        labels: the names of the tensors in errors, one for each; empty for names made from that of the call.
        compression: of a reduction: the format that is asked for; see :func:`compression_of`.
        root, splits, alike: as of :class:`~horovod.core.negotiation.messages.Request`.

    Raises:
        TypeError, ValueError: the operation has no meaning for a tensor's type, or the request cannot be sent.
    """
    called = full_name(prefix, name) if prefix and name is not None else name or ""
    if line is None:
        line = caller(2)  # without this frame and that of the calling function
    described = tuple(map(_TYPE_AND_SHAPE, tensors))
    splits, labels = tuple(splits), tuple(labels)
    compression = compression_of(compression, op, tensors) if compression else ""
    key = (
        operation,
        prefix,
        described,
        op,
        prescale,
        postscale,
        root,
        splits,
        device,
        line,
        labels,
        alike,
        compression,
    )
    place = called or key
    prepared = known.get(place)  # recall() without its call
    if prepared is None or prepared.key != key:
        request = make_request(
            operation,
            prefix,
            name,
            tensors,
            op,
            prescale,
            postscale,
            root,
            splits,
            device,
            line,
            labels,
            alike,
            compression=compression,
        )
        prepared = remember(place, Prepared(key, request))
    return prepared


def make_request(
    operation: Operation,
    prefix: str,
    name: str | None,
    tensors: Sequence[Tensor | TensorSpec],
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
    splits: Sequence[int] = (),
    device: str = HOST,
    line: str = "",
    labels: Sequence[str] = (),
    alike: str = "",
    transient: bool = False,
    compression: str = "",
) -> Request:
    """The checked request of one collective. The arguments and errors are those of :func:`prepared_call`.

    Args:
        transient: the name will not be used again.
    """
    called = full_name(prefix, name) if prefix else name or ""
    unnamed = not called
    called = called or prefix + UNNAMED
    if not labels:
        count = len(tensors)
        labels = [called] if count == 1 else [f"{called}_{number}of{count}" for number in range(1, count + 1)]
    if operation in _REDUCING:
        prescale, postscale = factors(prescale, postscale)
        shown = [(label.partition(UNNAMED)[0] if unnamed else label) for label in labels]
        types = [each.data_type for each in tensors]
        check_reduction(_REDUCING[operation], [*zip(shown, types, strict=True)], op, prescale, postscale)
        if op == ReduceOp.ADASUM:
            operation = Operation.ADASUM
    specs = tuple([TensorSpec(label, each.data_type, each.shape) for label, each in zip(labels, tensors, strict=True)])
    return sendable(
        Request(
            operation,
            called,
            specs,
            op,
            prescale,
            postscale,
            root,
            tuple(splits),
            device,
            caller=line,
            transient=transient or unnamed,
            unnamed=unnamed,
            alike=alike,
            compression=compression_of(compression, op, specs) if compression else "",
        )
    )


def compression_of(asked: str, op: ReduceOp, tensors: Sequence[Tensor | TensorSpec]) -> str:
    """The format in which a reduction is compressed: ``asked``, or "" if none of its tensors is to be compressed.

    The tensors that are too short, or not of a floating-point type, are sent as they are also beside others.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return ""
    return asked if any(can_compress(each.data_type, prod(each.shape)) for each in tensors) else ""


def checked_root(root: int, ranks: Sequence[int], called: str) -> int:
    """The root of a broadcast.

    Args:
        ranks: the members of the process set.
        called: the name of the call, for errors.

    Raises:
        TypeError, ValueError: it is not one of them.
    """
    root = whole_number(root, "root_rank")
    if root not in ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root} for provided process set: {called!r} can come from "
            f"ranks {list(ranks)}"
        )
    return root


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
