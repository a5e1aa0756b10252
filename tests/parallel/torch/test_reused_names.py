"""What travels time and again by one name, or from one line: what was found out about it serves again only where it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd


def total(size: int) -> float:
    """Of 1 + rank over all ranks."""
    return size * (size + 1) / 2


@pytest.mark.parametrize("name", ["wanders", None])
@pytest.mark.parametrize("size", [1, 2])
def test_a_name_whose_tensor_moves_each_time_gives_right_results(job: Any, size: int, name: str | None) -> None:
    def check() -> None:
        mine, everybody = 1.0 + hvd.rank(), total(size)
        kept = []  # so that no two have the same address
        for shape in [(4, 3), (4, 3), (12,), (3, 4), (2,), (4, 3)]:
            for dtype in (torch.float32, torch.bfloat16, torch.float32):
                tensor = torch.full(shape, mine, dtype=dtype)
                kept.append(tensor)
                hvd.allreduce_(tensor, name=name, op=hvd.Sum)
                assert (tensor == everybody).all(), (shape, dtype)
                result = hvd.allreduce(torch.full(shape, mine, dtype=dtype), name=name, op=hvd.Sum)
                assert (result == everybody).all() and result.shape == shape and result.dtype == dtype

    job(size, check)


def test_a_tensor_that_gets_other_memory_is_reduced_there(job: Any) -> None:
    def check() -> None:
        tensor = torch.full((6,), 1.0 + hvd.rank())
        first = tensor.data  # keeps the first memory, and would show what is written there
        hvd.allreduce_(tensor, name="moves", op=hvd.Sum)
        tensor.data = torch.full((6,), 10.0)
        hvd.allreduce_(tensor, name="moves", op=hvd.Sum)
        assert (tensor == 20).all() and (first == total(2)).all()

    job(2, check)


@pytest.mark.parametrize("name", ["named", None])
def test_other_tensors_in_the_same_place_are_checked_and_reduced_as_they_are(job: Any, name: str | None) -> None:
    def check() -> None:
        base = torch.empty(24)
        for view in (base, base[:12], base.view(4, 6), base[:12], base.view(torch.int32), base[:1], base[:0], base[:0]):
            view.fill_(1 + hvd.rank())
            hvd.allreduce_(view, name=name, op=hvd.Sum)
            assert (view == total(2)).all()
        with pytest.raises(ValueError, match="contiguous"):
            hvd.allreduce_(base.view(4, 6).t(), name=name, op=hvd.Sum)
        transposed = torch.empty(6, 4).t().fill_(1)
        base.view(4, 6).fill_(1)
        hvd.allreduce_(base.view(4, 6), name=name, op=hvd.Sum)
        with pytest.raises(ValueError, match="contiguous"):
            hvd.allreduce_(transposed, name=name, op=hvd.Sum)

    job(2, check)


def test_a_lazily_negated_view_is_refused_after_a_tensor_at_the_same_address(job: Any) -> None:
    def check() -> None:
        number = torch.tensor([1.0 + 2.0j])
        plain, negative = number.imag, number.conj().imag
        assert plain.data_ptr() == negative.data_ptr() and negative.is_neg() and negative.is_contiguous()
        for _ in range(2):
            assert hvd.allreduce(plain, name="sign", op=hvd.Sum).item() == 4
            with pytest.raises(ValueError, match="lazily negated view"):
                hvd.allreduce(negative, name="sign", op=hvd.Sum)

    job(2, check)


def test_tensors_that_are_being_reduced_are_kept_alive(job: Any) -> None:
    def check() -> None:
        for _ in range(3):
            handles = [
                hvd.allreduce_async(torch.full((300_000,), 1.0 + hvd.rank()), name=f"dropped.{index}", op=hvd.Sum)
                for index in range(8)
            ]
            others = [torch.full((300_000,), -1.0) for _ in range(16)]  # in that memory, had it been free
            assert all((hvd.synchronize(handle) == total(2)).all() for handle in handles)
            assert all((other == -1).all() for other in others)

    job(2, check)


def test_one_name_in_two_process_sets_again_and_again_is_reduced_in_each(job: Any) -> None:
    def check(sets: list[hvd.ProcessSet]) -> None:
        alone = sets[hvd.rank()]
        for _ in range(3):
            ones, twos = torch.ones(50), torch.full((50,), 2.0)
            first = hvd.allreduce_async_(ones, name="both", op=hvd.Sum)
            second = hvd.allreduce_async_(twos, name="both", op=hvd.Sum, process_set=alone)
            assert (hvd.synchronize(second) == 2).all() and (hvd.synchronize(first) == 2).all()

    job(2, check, sets=[[0], [1]])


def test_gradients_that_move_from_step_to_step_are_the_same_on_all_ranks(job: Any) -> None:
    def check() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))  # one bias has one element
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
        kept = []
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + hvd.rank() + step)).sum().backward()
            optimizer.synchronize()
            gathered = [hvd.allgather(p.grad.reshape(1, -1)) for p in model.parameters()]
            assert all((each[0] == each[1]).all() for each in gathered), step
            assert model[0].weight.grad[0].sum() != 0
            kept += [p.grad for p in model.parameters()]  # the next step's are elsewhere
            with optimizer.skip_synchronize():
                optimizer.step()

    job(2, check)


def test_gradients_discarded_while_they_are_reduced_write_into_no_other_tensor(job: Any) -> None:
    def check() -> None:
        parameters = [torch.nn.Parameter(torch.ones(200_000)) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 1.0))
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() for p in parameters).backward()
            for parameter in parameters:
                parameter.grad = None
            others = [torch.full((200_000,), -1.0) for _ in range(8)]
            optimizer.step()
            assert all((other == -1).all() for other in others)
        hvd.barrier()

    job(2, check)


def test_one_line_may_reduce_anything_in_any_way(job: Any) -> None:
    """Without a name, calls are told apart by everything that their requests are made of."""

    def check() -> None:
        import random

        chosen = random.Random(7)
        ways = {hvd.Sum: 3.0, hvd.Average: 1.5, hvd.Max: 2.0, hvd.Min: 1.0, hvd.Product: 2.0}
        under_way = []
        for _ in range(120):
            op, expected = chosen.choice(list(ways.items()))
            shape = chosen.choice([(), (1,), (5,), (2, 3), (0,), (3000,)])
            before, after = chosen.choice([(1.0, 1.0), (2.0, 1.0), (1.0, 0.5)])
            tensor = torch.full(shape, 1.0 + hvd.rank(), dtype=chosen.choice([torch.float32, torch.float64]))
            scaled = expected * after * (before**2 if op == hvd.Product else before)
            start = hvd.allreduce_async_ if chosen.random() < 0.5 else hvd.allreduce_async
            handle = start(tensor, op=op, prescale_factor=before, postscale_factor=after)
            under_way.append((handle, scaled, tensor.shape, tensor.dtype))
            while len(under_way) > chosen.choice([0, 3]):
                handle, scaled, *kind = under_way.pop(chosen.randrange(len(under_way)))
                result = hvd.synchronize(handle)
                assert (result == scaled).all() and [result.shape, result.dtype] == kind

    job(2, check)
