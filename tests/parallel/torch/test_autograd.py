"""Gradients of the operations that return new tensors, against arithmetic over all ranks' losses done in one process.

Every rank's loss is ``sum(weight_of_rank * output)``, so the gradient that comes into an operation on rank r is that weight.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd

SIZES = [1, 2, 3]


def weight(rank: int, shape: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, tuple(shape), generator=generator).double()


def leaf(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_allreduce_is_the_reduction_of_all_gradients(job: Any, size: int) -> None:
    def check() -> None:
        total = sum(weight(r, (3, 2)) for r in range(size))
        mine = weight(hvd.rank(), (3, 2))
        for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size), (None, 1 / size)):
            x = leaf(hvd.rank(), 3, 2)
            y = hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
            assert y.requires_grad
            (y * mine).sum().backward()
            assert torch.allclose(x.grad, total * factor * 0.5)
            x, z = leaf(hvd.rank(), 3, 2), leaf(hvd.rank(), 3, 2)
            y = hvd.grouped_allreduce([x, z], op=op)
            ((y[0] + 2 * y[1]) * mine).sum().backward()
            assert torch.allclose(x.grad, total * factor) and torch.allclose(z.grad, 2 * total * factor)
        x = leaf(hvd.rank(), 3, 2)
        hvd.allreduce(x, op=hvd.Sum).sum().backward()  # an incoming gradient with strides of 0
        assert torch.equal(x.grad, torch.full((3, 2), float(size), dtype=torch.float64))
        x = leaf(hvd.rank(), 3, 2)
        hvd.allreduce(x.t().contiguous(), op=hvd.Sum).t().mul(mine).sum().backward()
        assert torch.allclose(x.grad, total)

    job(size, check)


def test_the_gradient_of_a_compressed_reduction_has_the_type_of_its_input(job: Any) -> None:
    def check() -> None:
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            x = leaf(hvd.rank(), 4, dtype=torch.float32)
            y = hvd.allreduce(x, op=hvd.Sum, compression=compression)
            y.mul(hvd.rank() + 1).sum().backward()
            assert x.grad.dtype == torch.float32 and x.grad.tolist() == [3.0] * 4
            z = leaf(hvd.rank(), 4, dtype=torch.float32)
            hvd.reducescatter(z, op=hvd.Average, compression=compression).sum().backward()
            assert z.grad.dtype == torch.float32 and z.grad.tolist() == [1.0] * 4

    job(2, check)


def test_tensors_of_a_group_without_gradients_leave_those_of_the_others_right(job: Any) -> None:
    def check() -> None:
        x, fixed = leaf(hvd.rank(), 2), torch.ones(2, dtype=torch.float64)
        y, z = hvd.grouped_allreduce([x, fixed], op=hvd.Sum)
        y.sum().backward()  # z takes no part in the loss
        assert x.grad.tolist() == [2.0, 2.0] and fixed.grad is None and z.tolist() == [2.0, 2.0]
        x, other = leaf(hvd.rank(), 2), leaf(hvd.rank(), 3)
        hvd.grouped_allgather([x, other])[1].sum().backward()
        assert x.grad.tolist() == [0.0, 0.0] and other.grad.tolist() == [1.0] * 3

    job(2, check)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_allgather_is_the_average_of_this_ranks_rows(job: Any, size: int) -> None:
    def check() -> None:
        rank, rows = hvd.rank(), [2 * r + 1 for r in range(size)]
        start, stop = sum(rows[:rank]), sum(rows[: rank + 1])
        mean = sum(weight(r, (sum(rows), 3)) for r in range(size)) / size  # averaged, not summed
        x = leaf(rank, rows[rank], 3)
        y = hvd.allgather(x)
        assert torch.equal(y[start:stop], x)
        (y * weight(rank, y.shape)).sum().backward()
        assert torch.allclose(x.grad, mean[start:stop])
        x, z = leaf(rank, rows[rank], 3), leaf(rank, 1)
        y = hvd.grouped_allgather([x, z], name="group")
        ((y[0] * weight(rank, y[0].shape)).sum() + (y[1] * (rank + 1)).sum()).backward()
        assert torch.allclose(x.grad, mean[start:stop])
        assert torch.allclose(z.grad, torch.tensor([(size + 1) / 2], dtype=torch.float64))

    job(size, check)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_broadcast_goes_to_the_root_alone(job: Any, size: int) -> None:
    def check() -> None:
        mean = sum(weight(r, (2, 2)) for r in range(size)) / size
        for root in range(size):
            x = leaf(hvd.rank(), 2, 2)
            y = hvd.broadcast(x, root)
            (y * weight(hvd.rank(), (2, 2))).sum().backward()
            assert torch.allclose(x.grad, mean if hvd.rank() == root else torch.zeros(2, 2, dtype=torch.float64))
        x = leaf(hvd.rank(), 1)
        (hvd.broadcast(x, 0) * float("inf")).backward()
        assert x.grad.item() == (0.0 if hvd.rank() else float("inf"))

    job(size, check)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_alltoall_comes_back_from_where_the_rows_went(job: Any, size: int) -> None:
    def check() -> None:
        rank = hvd.rank()
        splits = [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]
        # weights of the rows that arrived on each rank, cut by where they came from
        arrived = [weight(r, (sum(splits[s][r] for s in range(size)), 2)) for r in range(size)]
        parts = [arrived[r].split([splits[s][r] for s in range(size)])[rank] for r in range(size)]
        for given in (splits[rank], torch.tensor(splits[rank], dtype=torch.int32)):
            for spare in (0, 2):  # rows that nobody gets have no gradient
                x = leaf(rank, sum(splits[rank]) + spare, 2)
                y, received = hvd.alltoall(x, given)
                assert not received.requires_grad
                (y * arrived[rank]).sum().backward()
                assert torch.allclose(x.grad, torch.cat([*parts, torch.zeros(spare, 2, dtype=torch.float64)]))
        x = leaf(rank, size)
        (hvd.alltoall(x) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [float(r + 1) for r in range(size)]

    job(size, check)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_reducescatter_is_gathered_from_all_ranks(job: Any, size: int) -> None:
    def check() -> None:
        rank, rows = hvd.rank(), size + 1
        dealt = [rows // size + (r < rows % size) for r in range(size)]
        everybody = torch.cat([weight(r, (dealt[r], 2)) for r in range(size)])
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            x = leaf(rank, rows, 2)
            y = hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
            mine = weight(rank, y.shape)
            before = mine.clone()
            y.backward(mine)
            assert torch.allclose(x.grad, everybody * factor * 0.5)
            assert torch.equal(mine, before)
            x, z = leaf(rank, rows, 2), leaf(rank, rows)
            y = hvd.grouped_reducescatter([x, z], op=op)
            ((y[0] * weight(rank, y[0].shape)).sum() + y[1].sum()).backward()
            assert torch.allclose(x.grad, everybody * factor)
            assert z.grad.tolist() == [float(factor)] * rows

    job(size, check)


def test_no_gradient_where_none_is_wanted(job: Any) -> None:
    def check() -> None:
        plain = torch.ones(2)
        for output in (hvd.allreduce(plain), hvd.allgather(plain), hvd.broadcast(plain, 0), hvd.alltoall(plain)):
            assert not output.requires_grad
        x = leaf(hvd.rank(), 2)
        assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad

    job(2, check)


def test_gradients_inside_a_process_set_come_from_its_members_alone(job: Any) -> None:
    def check(sets: Any) -> None:
        if hvd.rank() == 1:
            return
        pair = sets[0]  # ranks 0 and 2
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            x = leaf(hvd.rank(), 2)
            y = call(x, process_set=pair)
            (y * (hvd.rank() + 1)).sum().backward()
            wanted = {
                hvd.allreduce: [2.0, 2.0],
                hvd.allgather: [2.0, 2.0],
                hvd.alltoall: [1.0, 3.0],
                hvd.reducescatter: [1.0, 3.0],
            }
            assert x.grad.tolist() == wanted[call], call
        x = leaf(hvd.rank(), 2)
        (hvd.broadcast(x, 2, process_set=pair) * (hvd.rank() + 1)).sum().backward()
        assert x.grad.tolist() == ([2.0, 2.0] if hvd.rank() == 2 else [0.0, 0.0])

    job(3, check, sets=[[0, 2]])
