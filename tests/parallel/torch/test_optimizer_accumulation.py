"""Several backward passes a step: announced, inside ``no_sync()``, fewer than announced, or thrown away.

With every pass but the last, gradients stay a rank's own; when the last one's ``backward()`` returns, they are reduced.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import MAKERS, assert_close, assert_same_on_all_ranks, batches, loss_of, network
from torch_versions import needs_torch


def one(**wrapping: Any) -> tuple[nn.Parameter, Any]:
    """A parameter of two zeros, and an optimizer that subtracts its gradient."""
    parameter = nn.Parameter(torch.zeros(2))
    return parameter, hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **wrapping)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_passes_inside_no_sync_do_not_count(job: Any, op: str) -> None:
    def check() -> None:
        parameter, optimizer = one(op=getattr(hvd, op))
        for _ in range(2):
            optimizer.zero_grad()
            rank = hvd.rank() if op == "Average" else 0  # Adasum of equal steps is their average
            with optimizer.no_sync():
                for _ in range(3):
                    (parameter * (2 + 2 * rank)).sum().backward()
                with optimizer.no_sync():
                    (parameter * (2 + 2 * rank)).sum().backward()
                (parameter * (2 + 2 * rank)).sum().backward()
                assert parameter.grad.tolist() == [10.0 * (rank + 1)] * 2
            (parameter * (2 + 2 * rank)).sum().backward()
            assert parameter.grad.tolist() == [18.0 if op == "Average" else 12.0] * 2
            optimizer.step()
        assert parameter.tolist() == [-36.0 if op == "Average" else -24.0] * 2

    job(2, check)


def test_passes_inside_no_sync_are_not_counted_as_announced_ones(job: Any) -> None:
    def check() -> None:
        parameter, optimizer = one(backward_passes_per_step=2)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                parameter.sum().backward()
            parameter.sum().backward()
            assert parameter.grad.tolist() == [2.0, 2.0]
            (parameter * hvd.rank()).sum().backward()
            assert parameter.grad.tolist() == [2.5, 2.5]
            optimizer.step()
        assert parameter.tolist() == [-5.0, -5.0]

    job(2, check)


def test_stepping_inside_no_sync_is_refused(job: Any) -> None:
    def check() -> None:
        for op in (hvd.Average, hvd.Adasum):
            parameter, optimizer = one(op=op)
            parameter.sum().backward()
            with (
                optimizer.no_sync(),
                pytest.raises(AssertionError, match=r"inside optimizer.no_sync\(\) gradients are"),
            ):
                optimizer.step()
            optimizer.step()
            assert parameter.tolist() == [-1.0, -1.0]
        parameter, optimizer = one(op=hvd.Adasum)
        parameter.sum().backward()
        with optimizer.no_sync(), pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            parameter.sum().backward()  # the step with that gradient is made
        optimizer.step()

    job(2, check)


@pytest.mark.parametrize("op", ["Average", "Sum", "Min"])
def test_a_pass_inside_no_sync_after_a_reduced_one_is_reduced_in_step(job: Any, op: str) -> None:
    def check() -> None:
        parameter, optimizer = one(op=getattr(hvd, op))
        mine = hvd.rank() + 1.0
        (parameter * mine).sum().backward()
        once = {"Average": 1.5, "Sum": 3.0, "Min": 1.0}[op]
        assert parameter.grad.tolist() == [once] * 2
        with optimizer.no_sync():
            (parameter * mine).sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-2 * once] * 2

    job(2, check)


def test_an_error_inside_no_sync_leaves_it(job: Any) -> None:
    def check() -> None:
        parameter, optimizer = one()
        with pytest.raises(KeyError), optimizer.no_sync():
            raise KeyError
        (parameter * (1 + hvd.rank())).sum().backward()
        assert parameter.grad.tolist() == [1.5, 1.5]
        optimizer.step()
        assert parameter.tolist() == [-1.5, -1.5]

    job(2, check)


@needs_torch("2.13", "a pool of addresses of tensors, perhaps before 2.13")
def test_a_gradient_made_anew_between_local_passes_may_lie_where_the_old_one_was(job: Any) -> None:
    def check() -> None:
        parameter, optimizer = one()
        places = []
        with optimizer.no_sync():
            for _ in range(50):
                (parameter * 2).sum().backward()
                places.append(parameter.grad._cdata)
                parameter.grad = None
        (parameter * 2).sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-2.0, -2.0]
        assert any(old == new for old, new in pairwise(places)), "the allocator has not used an address again"

    job(2, check)


def test_passes_that_were_thrown_away_do_not_count(job: Any) -> None:
    def check() -> None:
        for op in (hvd.Average, hvd.Adasum):
            parameter, optimizer = one(backward_passes_per_step=2, op=op)
            for _ in range(2):
                (parameter * 7).sum().backward()
                optimizer.zero_grad()
                parameter.sum().backward()
                parameter.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert parameter.tolist() == [-4.0, -4.0]

    job(2, check)


def test_the_number_of_passes_can_change(job: Any) -> None:
    """As for the last, shorter, accumulation of an epoch; also between backward and step."""

    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["momentum"](model.parameters()), model.named_parameters(), backward_passes_per_step=3
        )
        other = MAKERS["momentum"](wanted.parameters())
        mine, everybodys = list(batches(8, 2, hvd.rank())), list(batches(8, 2))
        for passes, part in ((3, slice(0, 3)), (2, slice(3, 5)), (1, slice(5, 6)), (2, slice(6, 8))):
            assert optimizer.backward_passes_per_step == passes
            optimizer.zero_grad()
            other.zero_grad()
            for batch in mine[part]:
                loss_of(model, batch).backward()
            gradients = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
            assert hvd.allgather_object(gradients) == [gradients] * 2
            optimizer.set_backward_passes_per_step({3: 2, 2: 1, 1: 2}[passes])
            optimizer.step()
            for batch in everybodys[part]:
                loss_of(wanted, batch).backward()
            other.step()
        assert_close(model, wanted)
        assert_same_on_all_ranks(model)

    job(2, check)


def test_a_rank_that_makes_fewer_passes_takes_part_with_what_it_has(job: Any) -> None:
    """A rank that has run out of data takes part in the step with what it has."""

    def check() -> None:
        for wrapping in ({"backward_passes_per_step": 3}, {"backward_passes_per_step": 3, "op": hvd.Sum}):
            parameter, optimizer = one(**wrapping)
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(3 if hvd.rank() == 0 else 1):
                    parameter.sum().backward()
                optimizer.step()
            assert parameter.tolist() == [-8.0 if "op" in wrapping else -4.0] * 2

    job(2, check)
