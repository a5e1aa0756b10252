"""Gradients, and gradients of gradients, of every operation that returns new tensors, against one process that does it all.

``TOGETHER`` computes what all ranks' calls give, from all ranks' inputs, with ordinary operations; autograd then tells what
each rank's gradient is. The interface averages the gradients of what it copies, and does not scale those of what it
scatters, so the gradients are the reference's times the factors beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import horovod.torch as hvd

Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """An operation: as one rank calls it, as one process does it for all ranks, and how its gradients are scaled.

    Attributes:
        call: ``call(tensors, process_set)``.
        together: from all ranks' tensor to all ranks' result.
        factor, second: of the gradient, and of the gradient's gradient, for n ranks.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    together: Callable[[Tensors], Tensors]
    factor: Callable[[int], float]
    second: Callable[[int], float]


def exact(n: int) -> float:
    return 1.0


def averaged(n: int) -> float:
    return 1 / n


def averaged_twice(n: int) -> float:
    return 1 / n**2


def scattered(n: int) -> float:
    return float(n)


def every(function: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """All ranks have the same."""
    return lambda xs: [function(xs) for _ in xs]


def exchanged(xs: Tensors) -> Tensors:
    parts = [x.chunk(len(xs)) for x in xs]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]


def shares(xs: Tensors) -> Tensors:
    return list(sum(xs).chunk(len(xs)))  # type: ignore[union-attr]  # a sum of tensors


CASES: dict[str, Case] = {
    "allreduce-Sum": Case(
        lambda xs, s: [hvd.allreduce(x, op=hvd.Sum, process_set=s) for x in xs], every(sum), exact, exact
    ),
    "allreduce-Average-scaled": Case(
        lambda xs, s: [hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5, process_set=s) for x in xs],
        every(lambda xs: sum(xs) * 1.5 / len(xs)),
        exact,
        exact,
    ),
    "grouped_allreduce": Case(
        lambda xs, s: hvd.grouped_allreduce(xs, op=hvd.Sum, process_set=s), every(sum), exact, exact
    ),
    "allgather": Case(
        lambda xs, s: [hvd.allgather(x, process_set=s) for x in xs], every(torch.cat), averaged, averaged_twice
    ),
    "grouped_allgather": Case(
        lambda xs, s: hvd.grouped_allgather(xs, process_set=s), every(torch.cat), averaged, averaged_twice
    ),
    "broadcast": Case(
        lambda xs, s: [hvd.broadcast(x, 2, process_set=s) for x in xs],
        every(lambda xs: xs[-1] + 0 * sum(xs)),
        averaged,
        averaged_twice,
    ),
    "alltoall": Case(lambda xs, s: [hvd.alltoall(x, process_set=s) for x in xs], exchanged, exact, exact),
    "alltoall-splits": Case(
        lambda xs, s: [hvd.alltoall(x, [len(x) // s.size()] * s.size(), process_set=s)[0] for x in xs],
        exchanged,
        exact,
        exact,
    ),
    "reducescatter-Sum": Case(
        lambda xs, s: [hvd.reducescatter(x, op=hvd.Sum, process_set=s) for x in xs], shares, scattered, scattered
    ),
    "reducescatter-Average": Case(
        lambda xs, s: [hvd.reducescatter(x, process_set=s) for x in xs],
        lambda xs: [share / len(xs) for share in shares(xs)],
        scattered,
        scattered,
    ),
    "grouped_reducescatter": Case(
        lambda xs, s: hvd.grouped_reducescatter(xs, op=hvd.Sum, process_set=s), shares, scattered, scattered
    ),
}


def leaves(rank: int) -> Tensors:
    """Two tensors of one rank."""
    random = torch.Generator().manual_seed(rank)
    return [torch.rand(12, columns, generator=random, dtype=torch.float64).requires_grad_() for columns in (3, 2)]


def loss(outputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Not linear, different on each rank, and with gradients that come back transposed and expanded."""
    terms = []
    for output in outputs:
        weight = torch.cos(torch.arange(output.numel(), dtype=torch.float64) + rank).reshape(output.t().shape)
        terms.append((output.t().square() * weight).sum() + output.sum())
    return torch.stack(terms).sum()


def directions(xs: Tensors) -> Tensors:
    return [torch.sin(torch.arange(x.numel(), dtype=torch.float64)).reshape(x.shape) for x in xs]


def reference(case: Case, ranks: Sequence[int]) -> dict[int, tuple[Tensors, Tensors]]:
    """By rank, the gradients, and the gradients of the gradients' products with ``directions``."""
    n = len(ranks)
    inputs = [leaves(rank) for rank in ranks]
    found: dict[int, tuple[Tensors, Tensors]] = {rank: ([], []) for rank in ranks}
    for number in range(2):
        xs = [each[number] for each in inputs]
        total = torch.stack([loss([y], rank) for y, rank in zip(case.together(xs), ranks, strict=True)]).sum()
        first = torch.autograd.grad(total, xs, create_graph=True)
        product = torch.stack([(g * d).sum() for g, d in zip(first, directions(xs), strict=True)]).sum()
        second = torch.autograd.grad(product, xs)
        for rank, one, two in zip(ranks, first, second, strict=True):
            found[rank][0].append(one.detach() * case.factor(n))
            found[rank][1].append(two * case.second(n))
    return found


@pytest.mark.parametrize("ranks_of_set", [None, [0, 2]], ids=["all", "set"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(job: Any, name: str, ranks_of_set: list[int] | None) -> None:
    case = CASES[name]

    def check(sets: Any) -> None:
        process_set = sets[0] if ranks_of_set else hvd.global_process_set
        if not process_set.included():
            return
        wanted, wanted_second = reference(case, process_set.ranks)[hvd.rank()]
        xs = leaves(hvd.rank())
        value = loss(case.call(xs, process_set), hvd.rank())
        for _ in range(2):  # the same graph twice
            for x in xs:
                x.grad = None
            value.backward(retain_graph=True)
            for x, gradient in zip(xs, wanted, strict=True):
                assert x.grad is not None
                torch.testing.assert_close(x.grad, gradient)
        first = torch.autograd.grad(value, xs, create_graph=True)
        product = torch.stack([(g * d).sum() for g, d in zip(first, directions(xs), strict=True)]).sum()
        for found, gradient in zip(torch.autograd.grad(product, xs), wanted_second, strict=True):
            torch.testing.assert_close(found, gradient)

    job(3, check, sets=[[0, 2]])


def test_outputs_that_the_loss_does_not_use_count_as_zeros(job: Any) -> None:
    """Outputs without a gradient count as zeros, inputs that want none get none, and all ranks do the same."""

    def check() -> None:
        groups: list[Callable[[Tensors], Sequence[torch.Tensor]]] = [
            hvd.grouped_allreduce,
            hvd.grouped_allgather,
            hvd.grouped_reducescatter,
        ]
        for call in groups:
            used, unused = (torch.ones(4, 2, requires_grad=True) for _ in range(2))
            fixed, whole = torch.ones(4, 2), torch.ones(4, dtype=torch.int64)
            outputs = call([used, unused, fixed, whole])
            assert [output.requires_grad for output in outputs] == [True, True, True, False]
            outputs[0].sum().backward()
            assert used.grad is not None and bool((used.grad == 1).all())
            assert unused.grad is None or not unused.grad.any()
            assert fixed.grad is None and whole.grad is None
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

    job(2, check)
