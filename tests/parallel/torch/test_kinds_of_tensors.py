"""Tensors that are not simply a block of numbers: each travels, or is refused with a text that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from dtensors import spread_over_a_mesh

OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": lambda t: hvd.allreduce(t, op=hvd.Sum),
    "allreduce_async": lambda t: hvd.synchronize(hvd.allreduce_async(t, op=hvd.Sum)),
    "allreduce_": lambda t: hvd.allreduce_(t, op=hvd.Sum),
    "allreduce_async_": lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Sum)),
    "grouped_allreduce": lambda t: hvd.grouped_allreduce([t], op=hvd.Sum)[0],
    "grouped_allreduce_async": lambda t: hvd.synchronize(hvd.grouped_allreduce_async([t], op=hvd.Sum))[0],
    "grouped_allreduce_": lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum)[0],
    "grouped_allreduce_async_": lambda t: hvd.synchronize(hvd.grouped_allreduce_async_([t], op=hvd.Sum))[0],
    "allgather": hvd.allgather,
    "allgather_async": lambda t: hvd.synchronize(hvd.allgather_async(t)),
    "grouped_allgather": lambda t: hvd.grouped_allgather([t])[0],
    "grouped_allgather_async": lambda t: hvd.synchronize(hvd.grouped_allgather_async([t]))[0],
    "broadcast": lambda t: hvd.broadcast(t, 1),
    "broadcast_async": lambda t: hvd.synchronize(hvd.broadcast_async(t, 1)),
    "broadcast_": lambda t: hvd.broadcast_(t, 1),
    "broadcast_async_": lambda t: hvd.synchronize(hvd.broadcast_async_(t, 1)),
    "alltoall": hvd.alltoall,
    "alltoall_async": lambda t: hvd.synchronize(hvd.alltoall_async(t))[0],
    "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum),
    "reducescatter_async": lambda t: hvd.synchronize(hvd.reducescatter_async(t, op=hvd.Sum)),
    "grouped_reducescatter": lambda t: hvd.grouped_reducescatter([t], op=hvd.Sum)[0],
    "grouped_reducescatter_async": lambda t: hvd.synchronize(hvd.grouped_reducescatter_async([t], op=hvd.Sum))[0],
}
IN_PLACE = {name for name in OPERATIONS if name.endswith("_")}
REMEMBERS = {
    name for name in OPERATIONS if "async" not in name and name not in IN_PLACE
}  # where its elements come from


class Nowhere(torch.Tensor):
    """A tensor whose class says what its elements are, as those of quantisation libraries do."""

    @classmethod
    def make(cls) -> torch.Tensor:
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) == "aten.detach.default":
            return args[0]
        raise NotImplementedError(function)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "channels last": (
        lambda: torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last),
        r"required to be contiguous. Call \.contiguous\(\)",
    ),
    "transposed": (lambda: torch.ones(4, 6).t(), "required to be contiguous"),
    "expanded": (lambda: torch.ones(1, 4).expand(4, 4), "required to be contiguous"),
    "every other": (lambda: torch.ones(8)[::2], "required to be contiguous"),
    "conjugate": (
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
        r"lazily conjugated view \(is_conj\(\)\)\. Call \.resolve_conj\(\)",
    ),
    "complex of 16-bit parts": (lambda: torch.ones(4, dtype=torch.complex32), "ComplexHalfTensor is not supported"),
    "DTensor": (spread_over_a_mesh, r"is a DTensor, .*\.to_local\(\), or the whole, \.full_tensor\(\)"),
    "parameter of FSDP2": (lambda: torch.nn.Parameter(spread_over_a_mesh()), r"is a DTensor, .*\.full_tensor\(\)"),
    "without memory": (lambda: Nowhere.make(), r"Nowhere, which has no memory of its own"),
    "negative view": (
        lambda: torch._neg_view(torch.ones(4)),
        r"lazily negated view \(is_neg\(\)\)\. Call \.resolve_neg\(\)",
    ),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "not supported"),
    "sparse": (lambda: torch.ones(4, 4).to_sparse(), "not supported. Use sparse_allreduce_async"),
    "sparse rows": (lambda: torch.ones(4, 4).to_sparse_csr(), "not supported"),
    "meta": (lambda: torch.ones(4, device="meta"), r"on meta; .*Move it with \.cpu\(\)"),
    "8-bit float": (lambda: torch.ones(4).to(torch.float8_e5m2), "not supported"),
    "a list": (lambda: [1.0, 2.0], "expected a torch.Tensor, not list"),
    "a number": (lambda: 1.0, "expected a torch.Tensor, not float"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_cannot_travel_are_refused_by_every_operation_and_the_job_goes_on(job: Any, kind: str) -> None:
    make, text = REFUSED[kind]

    def check() -> None:
        for name, operation in OPERATIONS.items():
            with pytest.raises(ValueError, match=text):
                operation(make())
                raise AssertionError(f"{name} took it")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0

    job(2, check)


TAKEN: dict[str, Callable[[], torch.Tensor]] = {
    "a parameter": lambda: torch.nn.Parameter(torch.full((4,), 1.0 + hvd.rank())),
    "requires gradient": lambda: torch.full((4,), 1.0 + hvd.rank(), requires_grad=True),
    "in the middle of a graph": lambda: torch.full((4,), 0.5 + hvd.rank() / 2, requires_grad=True) * 2,
    "a part of another": lambda: torch.full((12,), 1.0 + hvd.rank())[3:7],
    "a view of other shape": lambda: torch.full((2, 2), 1.0 + hvd.rank()).view(4),
    "of a type wider than it was": lambda: torch.full((16,), 0, dtype=torch.uint8).view(torch.float32) + 1 + hvd.rank(),
    "channels last of one pixel": lambda: torch.full((4, 1, 1, 1), 1.0 + hvd.rank()).to(
        memory_format=torch.channels_last
    ),
    "memory of NumPy": lambda: torch.from_numpy(torch.full((4,), 1.0 + hvd.rank()).numpy()),
    "shared with other processes": lambda: torch.full((4,), 1.0 + hvd.rank()).share_memory_(),
    "resolved": lambda: torch._neg_view(torch.full((4,), -1.0 - hvd.rank())).resolve_neg(),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_tensors_of_every_usable_kind_are_taken_by_every_operation(job: Any, kind: str) -> None:
    make = TAKEN[kind]

    def check() -> None:
        rank = hvd.rank()
        for name, operation in OPERATIONS.items():
            source = make()
            result = operation(source)
            wanted = [1.0, 1.0, 2.0, 2.0] if name.startswith("alltoall") else [3.0] * 4
            if "allgather" in name:
                wanted = [1.0] * 4 + [2.0] * 4
            elif "broadcast" in name:
                wanted = [2.0] * 4
            elif "reducescatter" in name:
                wanted = [3.0] * 2
            assert result.reshape(-1).tolist() == wanted, name
            assert (result is source) == (name in IN_PLACE), name
            if name not in IN_PLACE:
                assert source.reshape(-1).tolist() == [1.0 + rank] * 4, name
                assert type(result) is torch.Tensor
                assert result.requires_grad == (source.requires_grad and name in REMEMBERS), name

    job(2, check)
