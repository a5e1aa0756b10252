"""The common contract's tables of errors, line by line: what scripts and their tests look for in a message.

Source: the common contract of the public interface, sections 8.1 (what ranks are compared by) and 8.2 (what is refused at
once). Every rank must see the error, and the job must go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from time_limits import SOON

one = torch.ones
Case = tuple[Callable[[int], Any], str]

COMPARED: dict[str, Case] = {
    "data type": (
        lambda rank: hvd.allreduce(one(2, dtype=[torch.float32, torch.float64][rank]), name="x"),
        "Mismatched data types: One rank had type float32, but another rank had type float64.",
    ),
    "kind of operation": (
        lambda rank: _one_name(rank),
        "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER.",
    ),
    "shape in allreduce": (
        lambda rank: hvd.allreduce(one(2, 3 + rank), name="x"),
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but another rank sent a tensor of "
        "shape [2, 4].",
    ),
    "shape in Adasum": (
        lambda rank: hvd.allreduce(one(2 + rank), name="x", op=hvd.Adasum),
        "Mismatched ADASUM tensor shapes: One rank sent a tensor of shape [2], but another rank sent a tensor of shape [3].",
    ),
    "shape in broadcast": (
        lambda rank: hvd.broadcast(one(2 + rank), 0, name="x"),
        "Mismatched BROADCAST tensor shapes:",
    ),
    "shape in reducescatter": (
        lambda rank: hvd.reducescatter(one(2 + rank), name="x"),
        "Mismatched REDUCESCATTER tensor shapes:",
    ),
    "factor before": (
        lambda rank: hvd.allreduce(one(2), name="x", prescale_factor=1.0 + rank),
        "Mismatched prescale and/or postscale factors:",
    ),
    "factor behind": (
        lambda rank: hvd.reducescatter(one(2), name="x", postscale_factor=1.0 + rank),
        "Mismatched prescale and/or postscale factors:",
    ),
    "reduction": (
        lambda rank: hvd.allreduce(one(2), name="x", op=[hvd.Sum, hvd.Max][rank]),
        "Mismatched reduction operation:",
    ),
    "scalar in allgather": (
        lambda rank: hvd.allgather(torch.tensor(1.0), name="x"),
        "Process-set rank zero tried to ALLGATHER a rank-zero tensor.",
    ),
    "scalar in alltoall": (
        lambda rank: hvd.alltoall(torch.tensor(1.0), name="x"),
        "Process-set rank zero tried to ALLTOALL a rank-zero tensor.",
    ),
    "number of dimensions": (
        lambda rank: hvd.allgather(one(*[2] * (1 + rank)), name="x"),
        "One rank sent a tensor of rank 1, but another rank sent a tensor of rank 2.",
    ),
    "other dimensions": (
        lambda rank: hvd.alltoall(one(2, 3 + rank), name="x"),
        "One rank sent a tensor with dimension 1 equal to 3, but another rank sent a tensor with dimension 1 equal to 4.",
    ),
    "root": (
        lambda rank: hvd.broadcast(one(2), rank, name="x"),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
    ),
}


def _one_name(rank: int) -> Any:
    """One negotiated name for two operations: their prefixes end up the same."""
    if rank == 0:
        return hvd.allreduce(one(2), name="x.y")
    from horovod.comm.datatypes import DataType
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    array = one(2).numpy()
    tensor = Tensor(array, DataType.FLOAT32, (2,))
    return collectives.allgather("allreduce", "x.y", [tensor], lambda _, rows: array).wait(SOON)


@pytest.mark.parametrize("line", COMPARED)
def test_ranks_are_compared_by_type_shape_operation_and_factors(job: Any, line: str) -> None:
    def check(line: str) -> str:
        call, _ = COMPARED[line]
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call(hvd.rank())
        assert hvd.allreduce(one(1), op=hvd.Sum).item() == 2.0
        return str(caught.value)

    texts = job(2, check, line)
    assert COMPARED[line][1] in texts[0]
    assert texts[0] == texts[1]


NOBODYS = "Process set provided does not exist, or has not been registered."
MEMBERS = "Rank 1 is not a member of the provided process set."
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "Allreduce": lambda group: hvd.allreduce(one(2), process_set=group),
    "Allgather": lambda group: hvd.allgather(one(2), process_set=group),
    "Broadcast": lambda group: hvd.broadcast(one(2), 0, process_set=group),
    "Alltoall": lambda group: hvd.alltoall(one(2), process_set=group),
    "Reducescatter": lambda group: hvd.reducescatter(one(2), process_set=group),
    "Barrier": lambda group: hvd.barrier(process_set=group),
}
REFUSED: dict[str, Case] = {
    "uneven rows without splits": (
        lambda _: hvd.alltoall(one(3)),
        "splits not provided, but first dimension of tensor is not an even multiple of the number of workers.",
    ),
    "splits of two dimensions": (
        lambda _: hvd.alltoall(one(2), torch.ones(2, 1, dtype=torch.int32)),
        "alltoall expects a 1D splits tensor",
    ),
    "splits of another type": (
        lambda _: hvd.alltoall(one(2), torch.ones(2, dtype=torch.float32)),
        "alltoall expects splits to contain 32-bit integer elements",
    ),
    "number of splits": (
        lambda _: hvd.alltoall(one(2), torch.ones(3, dtype=torch.int32)),
        "Number of entries in splits does not equal number of workers.",
    ),
    "sum of splits": (
        lambda _: hvd.alltoall(one(2), torch.tensor([2, 1], dtype=torch.int32)),
        "Sum of splits entries is greater than the first dimension of tensor.",
    ),
    "root that is no member": (
        lambda _: hvd.broadcast(one(2), 2),
        "broadcast received invalid root rank 2 for provided process set",
    ),
    "scalar in reducescatter": (
        lambda _: hvd.reducescatter(torch.tensor(1.0)),
        "Reducescatter does not support scalar inputs",
    ),
    "average and op": (
        lambda _: hvd.allreduce(one(2), average=True, op=hvd.Sum),
        "The op parameter supersedes average. Please provide only one of them.",
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_arguments_are_refused_in_the_call(job: Any, line: str) -> None:
    def check(line: str) -> str:
        with pytest.raises(ValueError) as caught:
            REFUSED[line][0](hvd.rank())
        assert hvd.allreduce(one(1), op=hvd.Sum).item() == 2.0
        return str(caught.value)

    for text in job(2, check, line):
        assert REFUSED[line][1] in text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_unknown_set_and_one_of_other_ranks_are_refused_by_every_operation(job: Any, operation: str) -> None:
    def check(sets: Any, operation: str) -> None:
        call = OPERATIONS[operation]
        with pytest.raises(ValueError) as caught:
            call(hvd.ProcessSet([0, 1]))
        assert str(caught.value) == f"{operation}: {NOBODYS}"
        if hvd.rank() == 1:
            with pytest.raises(ValueError) as caught:
                call(sets[0])
            assert str(caught.value) == f"{operation}: {MEMBERS}"
        assert hvd.allreduce(one(1), op=hvd.Sum).item() == 2.0

    job(2, check, operation, sets=[[0]])


def test_a_name_in_flight_is_refused_and_free_once_it_is_done(job: Any) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            first = hvd.allreduce_async(one(2), name="twice", op=hvd.Sum)
            with pytest.raises(ValueError) as caught:
                hvd.allreduce_async(one(2), name="twice", op=hvd.Sum)
            assert str(caught.value).startswith(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
                "currently being processed."
            )
            hvd.barrier()
            hvd.synchronize(first)
        else:
            hvd.barrier()
            hvd.allreduce(one(2), name="twice", op=hvd.Sum)
        assert hvd.allreduce(one(2), name="twice", op=hvd.Sum)[0].item() == 2.0

    job(2, check)


@pytest.mark.parametrize("reduction", [hvd.Min, hvd.Max, hvd.Product])
def test_other_reductions_cannot_be_scattered(job: Any, reduction: int) -> None:
    def check(reduction: int) -> None:
        with pytest.raises((ValueError, hvd.HorovodInternalError), match="only supports AVERAGE and SUM"):
            hvd.reducescatter(one(2), op=reduction)

    job(2, check, reduction)
