"""Finds out whether the requests of all ranks for one name agree. Pure.

An error quotes the request of every rank, with the line of the script that submitted it. Ranks with equal requests are listed
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horovod._base.config import COMPRESSION
from horovod.core.negotiation.messages import HOST, Operation, Request, TensorSpec

MISMATCHED = "Mismatched requests"
"""How the error begins if ranks differ in ``Request.alike``."""

_SAME_SHAPE = {Operation.ALLREDUCE, Operation.ADASUM, Operation.BROADCAST, Operation.REDUCESCATTER}
_ROWS = {Operation.ALLGATHER, Operation.ALLTOALL, Operation.REDUCESCATTER}
_SCALED = {Operation.ALLREDUCE, Operation.ADASUM, Operation.REDUCESCATTER}


def disagreement(requests: Sequence[Request | None], ranks: Sequence[int]) -> str:
    """Why these requests cannot run together; "" if they can.

    Args:
        requests: one for each member, in set order; None for a member that has joined.
        ranks: the members' global ranks, for the message.
    """
    present = [request for request in requests if request is not None]
    first = present[0]
    alike = requests.count(first) == len(requests)
    if alike and (first.operation not in _ROWS or all(tensor.shape for tensor in first.tensors)):
        return ""
    reason = _mismatch(first, present)
    if not reason and len(present) < len(requests):
        obstacle = _join_obstacle(first, requests, ranks)
        if obstacle:
            reason = f"{first.operation.name.capitalize()} is not supported with Join at this time: {obstacle}."
    if not reason:
        return ""
    return f"{reason} Tensor {first.name!r}, as each rank submitted it:\n{_views(requests, ranks)}"


def _mismatch(first: Request, present: list[Request]) -> str:
    """The first mismatch, in the order in which the public interface checks."""
    operation = first.operation
    for other in present:
        if other.alike != first.alike:
            return f"{MISMATCHED}: One rank has {first.alike}, but another rank has {other.alike}."
    for other in present:
        if len(other.tensors) != len(first.tensors):
            if other.operation != first.operation:
                return _different_operations(first, other)
            return (
                f"Mismatched group sizes: One rank sent {len(first.tensors)} tensors, "
                f"but another rank sent {len(other.tensors)} tensors."
            )
        for ours, theirs in zip(first.tensors, other.tensors, strict=True):
            if ours.data_type != theirs.data_type:
                one, two = ours.data_type.label, theirs.data_type.label
                return f"Mismatched data types: One rank had type {one}, but another rank had type {two}.{_member(ours, first)}"
    for other in present:
        if other.operation != first.operation:
            return _different_operations(first, other)
    for other in present:
        for ours, theirs in zip(first.tensors, other.tensors, strict=True):
            reason = _shape_mismatch(operation, ours.shape, theirs.shape)
            if reason:
                return reason + _member(ours, first)
    for other in present:
        if operation in _SCALED and (other.prescale, other.postscale) != (first.prescale, first.postscale):
            return (
                f"Mismatched prescale and/or postscale factors: One rank sent {first.prescale:g} and "
                f"{first.postscale:g}, but another rank sent {other.prescale:g} and {other.postscale:g}."
            )
        if operation in _SCALED and other.reduce_op != first.reduce_op:
            one, two = first.reduce_op.label, other.reduce_op.label
            return f"Mismatched reduction operation: One rank requested {one}, but another rank requested {two}."
        if other.compression != first.compression:
            one, two = first.compression or "none", other.compression or "none"
            return (
                f"Mismatched compression: One rank compresses with {one}, but another rank compresses with {two}. Set "
                f"compression= and {COMPRESSION} alike on all ranks."
            )
        if other.root != first.root:
            return (
                f"Mismatched {operation.name} root ranks: One rank specified root rank {first.root}, "
                f"but another rank specified root rank {other.root}."
            )
        if other.device != first.device:
            return (
                f"Mismatched {operation.name} CPU/GPU device selection: One rank's tensor is on {first.device}, "
                f"but another rank's is on {other.device}."
            )
    return ""


def _different_operations(first: Request, other: Request) -> str:
    return (
        f"Mismatched operations: One rank did an {first.operation.name}, "
        f"but another rank did an {other.operation.name}."
    )


def _join_obstacle(first: Request, requests: Sequence[Request | None], ranks: Sequence[int]) -> str:
    """Why the operation needs a rank that has joined; "" if it does not."""
    joined = [rank for rank, request in zip(ranks, requests, strict=True) if request is None]
    if first.operation == Operation.REDUCESCATTER:
        return f"{list_ranks(joined)} joined already, so their rows of the result would be lost"
    if first.operation == Operation.BROADCAST and first.root in joined:
        return f"rank {first.root}, whose tensor it is, joined already"
    if first.operation == Operation.ALLTOALL:
        for rank, request in zip(ranks, requests, strict=True):
            for other, rows in zip(ranks, request.splits if request is not None else (), strict=False):
                if rows and other in joined:
                    return f"rank {other} joined already, and rank {rank} sends {rows} rows to it"
    return ""


def _member(tensor: TensorSpec, request: Request) -> str:
    """The name of the tensor, if it is one of a group."""
    return f" It is {tensor.name!r}." if len(request.tensors) > 1 else ""


def _shape_mismatch(operation: Operation, ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    if operation in _ROWS and not (ours and theirs):
        return f"Process-set rank zero tried to {operation.name} a rank-zero tensor."
    if operation in _SAME_SHAPE and ours != theirs:
        return (
            f"Mismatched {operation.name} tensor shapes: One rank sent a tensor of shape {list(ours)}, "
            f"but another rank sent a tensor of shape {list(theirs)}."
        )
    if operation in _ROWS:
        if len(ours) != len(theirs):
            return (
                f"Mismatched {operation.name} tensor shapes: One rank sent a tensor of rank {len(ours)}, "
                f"but another rank sent a tensor of rank {len(theirs)}."
            )
        for dimension in range(1, len(ours)):
            if ours[dimension] != theirs[dimension]:
                return (
                    f"Mismatched {operation.name} tensor shapes: One rank sent a tensor with dimension {dimension} "
                    f"equal to {ours[dimension]}, but another rank sent a tensor with dimension {dimension} "
                    f"equal to {theirs[dimension]}."
                )
    return ""


def _views(requests: Sequence[Request | None], ranks: Sequence[int]) -> str:
    by_view: dict[str, list[int]] = {}
    for rank, request in zip(ranks, requests, strict=True):
        by_view.setdefault("joined" if request is None else describe(request), []).append(rank)
    return "\n".join(f"  {list_ranks(members)}: {view}" for view, members in by_view.items())


def describe(request: Request) -> str:
    """A description of a request, for errors and reports of stalls."""
    operation = request.operation
    parts = [operation.name.lower()]
    if operation in _SCALED:
        parts[0] += f"({request.reduce_op.label})"
    if request.tensors:
        shown = [f"{tensor.data_type.label} {list(tensor.shape)}" for tensor in request.tensors[:4]]
        if len(request.tensors) > 4:
            shown.append(f"... {len(request.tensors)} tensors")
        parts.append(", ".join(shown))
    if request.alike:
        parts.append(f"of {request.alike}")
    if request.prescale != 1.0:
        parts.append(f"prescaled by {request.prescale:g}")
    if request.postscale != 1.0:
        parts.append(f"postscaled by {request.postscale:g}")
    if request.compression:
        parts.append(f"compressed with {request.compression}")
    if request.root >= 0:
        parts.append(f"{'from' if operation is Operation.BROADCAST else 'with'} root {request.root}")
    if request.device != HOST:
        parts.append(f"on {request.device}")
    if request.caller:
        parts.append(f"at {request.caller}")
    return " ".join(parts)


def list_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
