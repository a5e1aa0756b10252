"""Complex tensors: what PyTorch computes with them on one process comes out of every operation, and of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd

DTYPES = [torch.complex64, torch.complex128]
ROWS = 6


def of_rank(rank: int, dtype: torch.dtype, rows: int = ROWS) -> torch.Tensor:
    """Whole numbers as parts, so that every sum is exact."""
    parts = torch.arange(2.0 * rows).reshape(rows, 1, 2) * (rank + 1) - 5 * rank
    return torch.view_as_complex(parts).to(dtype)


def slices(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return whole.chunk(size)[rank]


# Each operation, and what it gives on a rank, from the tensors of all ranks.
OPERATIONS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[list[torch.Tensor], int], torch.Tensor]]] = {
    "allreduce": (lambda t: hvd.allreduce(t, op=hvd.Sum), lambda all_, rank: sum(all_)),
    "allreduce, named": (lambda t: hvd.allreduce(t, op=hvd.Sum, name="x"), lambda all_, rank: sum(all_)),
    "an average": (lambda t: hvd.allreduce(t, name="x"), lambda all_, rank: sum(all_) / len(all_)),
    "scaled": (
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4),
        lambda all_, rank: 2 * sum(all_),
    ),
    "compressed": (
        lambda t: hvd.allreduce(t, op=hvd.Sum, compression=hvd.Compression.fp16),
        lambda all_, rank: sum(all_),
    ),
    "a group": (
        lambda t: hvd.grouped_allreduce([t, t.real.clone()], op=hvd.Sum)[0],
        lambda all_, rank: sum(all_),
    ),
    "allgather": (hvd.allgather, lambda all_, rank: torch.cat(all_)),
    "a gathered group": (lambda t: hvd.grouped_allgather([t, t.imag.clone()])[0], lambda all_, rank: torch.cat(all_)),
    "broadcast": (lambda t: hvd.broadcast(t, 1), lambda all_, rank: all_[1]),
    "alltoall": (hvd.alltoall, lambda all_, rank: torch.cat([slices(each, rank, len(all_)) for each in all_])),
    "reducescatter": (
        lambda t: hvd.reducescatter(t, op=hvd.Sum),
        lambda all_, rank: slices(sum(all_), rank, len(all_)),
    ),
    "a scattered group": (
        lambda t: hvd.grouped_reducescatter([t, t.real.clone()])[0],
        lambda all_, rank: slices(sum(all_) / len(all_), rank, len(all_)),
    ),
}


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_takes_complex_tensors(job: Any, size: int) -> None:
    def check() -> None:
        for dtype in DTYPES:
            for rows in (ROWS, 60_000):
                everybody = [of_rank(rank, dtype, rows) for rank in range(size)]
                for name, (operation, wanted) in OPERATIONS.items():
                    found = operation(everybody[hvd.rank()].clone())
                    assert found.dtype == dtype
                    assert torch.allclose(found, wanted(everybody, hvd.rank()), rtol=1e-6), (name, dtype)

    job(size, check)


def test_complex_tensors_are_reduced_and_broadcast_in_place(job: Any) -> None:
    def check() -> None:
        for dtype in DTYPES:
            total = of_rank(0, dtype) + of_rank(1, dtype)
            for form in (hvd.allreduce_, lambda t, **k: hvd.synchronize(hvd.allreduce_async_(t, **k))):
                mine = of_rank(hvd.rank(), dtype)
                assert form(mine, op=hvd.Sum, name="x") is mine and torch.equal(mine, total)
            mine = [of_rank(hvd.rank(), dtype), torch.ones(3)]
            hvd.grouped_allreduce_(mine, op=hvd.Sum)
            assert torch.equal(mine[0], total) and mine[1].tolist() == [2.0] * 3
            hvd.broadcast_(mine[0], 0)
            assert torch.equal(mine[0], total)
        infinite = torch.tensor([complex(float("inf"), 2)])
        assert hvd.allreduce(infinite).tolist() == [complex(float("inf"), 2)]

    job(2, check)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "compressed"])  # reals are compressed
def test_gradients_are_those_of_the_parts(job: Any, name: str) -> None:
    """The operations are linear in real and imaginary parts, so the gradient is that of the operation on pairs of reals."""
    operation = OPERATIONS[name][0]

    def check() -> None:
        mine = of_rank(hvd.rank(), torch.complex128)
        weight = torch.view_as_complex(
            torch.rand(20, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        )
        whole = mine.clone().requires_grad_()
        result = operation(whole)
        (result * weight[: len(result)]).abs().square().sum().backward()
        parts = torch.view_as_real(mine).reshape(ROWS, 2).clone().requires_grad_()
        result = operation(parts) if "group" not in name else GROUPS[name](parts)
        result = torch.view_as_complex(result.reshape(-1, 1, 2))
        (result * weight[: len(result)]).abs().square().sum().backward()
        assert torch.allclose(torch.view_as_real(whole.grad).reshape(ROWS, 2), parts.grad)

    job(2, check)


GROUPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a group": lambda t: hvd.grouped_allreduce([t], op=hvd.Sum)[0],
    "a gathered group": lambda t: hvd.grouped_allgather([t])[0],
    "a scattered group": lambda t: hvd.grouped_reducescatter([t])[0],
}


def test_a_lazily_conjugated_gradient_is_taken_by_every_operation(job: Any) -> None:
    def check() -> None:
        for operation in (
            lambda t: hvd.allreduce(t, op=hvd.Sum),
            hvd.allgather,
            lambda t: hvd.broadcast(t, 0),
            hvd.alltoall,
        ):
            x = of_rank(hvd.rank(), torch.complex64).requires_grad_()
            operation(x).conj().backward(torch.full((ROWS * (2 if operation is hvd.allgather else 1), 1), 1 + 2j))
            assert x.grad is not None and (hvd.rank() or x.grad.imag.abs().sum() > 0)

    job(2, check)


def test_reductions_that_need_an_order_refuse_complex_tensors(job: Any) -> None:
    def check() -> None:
        for dtype in DTYPES:
            for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
                for call in (hvd.allreduce, hvd.allreduce_async_):
                    for name in ("x", None):
                        with pytest.raises(
                            ValueError, match=f"complex{8 * dtype.itemsize} cannot be reduced with {op.label}"
                        ):
                            call(of_rank(0, dtype), op=op, name=name)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0

    job(2, check)


def test_ranks_with_complex_types_of_different_widths_get_an_error(job: Any) -> None:
    def check() -> None:
        with pytest.raises(
            hvd.HorovodInternalError, match=r"One rank had type complex64, but another rank had type complex128"
        ):
            hvd.allreduce(of_rank(0, DTYPES[hvd.rank()]), name="x")

    job(2, check)


def test_sparse_complex_tensors_are_added_up(job: Any) -> None:
    def check() -> None:
        x = torch.sparse_coo_tensor(torch.tensor([[0, hvd.rank() + 1]]), torch.tensor([1j, 2.0]), (4,))
        assert hvd.sparse_allreduce_async(x, "x", hvd.Sum)().to_dense().tolist() == [2j, 2, 2, 0]

    job(2, check)
