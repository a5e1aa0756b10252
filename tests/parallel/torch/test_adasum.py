"""``op=hvd.Adasum`` in the PyTorch binding: the operation in its forms, and the optimizer that combines steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import digits
import horovod.torch as hvd


def adasum_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two ranks' tensors, in float64."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa > 0 else 1.0) * a + (1 - dot / (2 * bb) if bb > 0 else 1.0) * b


def statement(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """All ranks' tensors: neighbours combine, the last of an odd number goes up as it is."""
    level = [contribution.double() for contribution in contributions]
    while len(level) > 1:
        level = [adasum_of_two(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + len(shape))
    return (torch.randn(tuple(shape), generator=random, dtype=torch.float64) + 0.5).to(dtype)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_form_of_allreduce_gives_the_adasum_of_all_ranks(job: Any, size: int) -> None:
    def check() -> None:
        for dtype, tolerance in TOLERANCE.items():
            for shape in [(), (0,), (5,), (61, 17)]:
                everybody = [values(rank, shape, dtype) for rank in range(size)]
                wanted = 3 * statement([2 * each.double() for each in everybody])
                own = everybody[hvd.rank()]
                arguments: Any = {"op": hvd.Adasum, "prescale_factor": 2.0, "postscale_factor": 3.0}
                found = [
                    hvd.allreduce(own, **arguments),
                    hvd.allreduce_(own.clone(), **arguments),
                    *hvd.grouped_allreduce([own, own], **arguments),
                ]
                for each in found:
                    assert each.dtype == dtype and each.shape == own.shape
                    assert torch.equal(each, found[0])
                    torch.testing.assert_close(each.double(), wanted, rtol=tolerance, atol=4 * tolerance)

    job(size, check)


def test_adasum_of_a_process_set_combines_its_members_alone(job: Any) -> None:
    def check(sets: Any) -> None:
        (three,) = sets
        if three.included():
            found = hvd.allreduce(values(hvd.rank(), (7, 5)), op=hvd.Adasum, process_set=three)
            wanted = statement([values(rank, (7, 5)) for rank in (0, 2, 3)])
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    job(4, check, sets=[[0, 2, 3]])


def test_gradient_is_the_adasum_of_the_gradients(job: Any) -> None:
    def check() -> None:
        x = values(hvd.rank(), (6,)).requires_grad_()
        hvd.allreduce(x, op=hvd.Adasum).backward(values(hvd.rank() + 10, (6,)))
        wanted = statement([values(rank + 10, (6,)) for rank in range(2)])
        torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-5, atol=1e-5)

    job(2, check)


def test_types_without_adasum_and_ranks_that_disagree_get_an_error_and_the_job_goes_on(job: Any) -> None:
    def check() -> None:
        for dtype in (torch.int32, torch.bool, torch.uint8):
            with pytest.raises(ValueError, match="cannot be reduced with Adasum"):
                hvd.allreduce(torch.ones(2).to(dtype), op=hvd.Adasum)
        with pytest.raises(hvd.HorovodInternalError, match=r"One rank did an A(DASUM|LLREDUCE)"):
            hvd.allreduce(torch.ones(2), name="mixed", op=hvd.Adasum if hvd.rank() else hvd.Sum)
        assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1.0, 1.0]

    job(2, check)


# The optimizer


def network() -> nn.Sequential:
    """In float64, for Adam makes much of a rounding error in a gradient near zero."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=random).double(), torch.randn(8, 4, generator=random).double()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-plain": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def simulated(size: int, make: Callable[[Any], torch.optim.Optimizer], steps: int, passes: int) -> list[torch.Tensor]:
    """What the parameters must become: every rank's local step from the common start, combined."""
    models = [network() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for turn in range(passes):
                x, y = batch(rank, step * passes + turn)
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        for start, *stepped in zip(starts, *(model.parameters() for model in models), strict=True):
            combined = start + statement([p.detach() - start for p in stepped])
            with torch.no_grad():
                for p in stepped:
                    p.copy_(combined)
    return [p.detach() for p in models[0].parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
def test_the_optimizer_combines_local_steps(job: Any, size: int, bucket_bytes: str) -> None:
    def check() -> None:
        for name, make in OPTIMIZERS.items():
            for passes in (1, 2):
                model = network()
                optimizer = hvd.DistributedOptimizer(
                    make(model.parameters()), model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
                )
                assert isinstance(optimizer, type(make(model.parameters())))
                for step in range(5):
                    optimizer.zero_grad()
                    for turn in range(passes):
                        x, y = batch(hvd.rank(), step * passes + turn)
                        nn.functional.mse_loss(model(x), y).backward()
                    optimizer.synchronize()
                    optimizer.step()
                for p, wanted in zip(model.parameters(), simulated(size, make, 5, passes), strict=True):
                    torch.testing.assert_close(p.detach(), wanted, rtol=1e-9, atol=1e-9, msg=f"{name}, {passes} passes")
                    everybodys = hvd.allgather(p.detach().reshape(1, -1))
                    assert (everybodys == everybodys[0]).all(), "the same bits on every rank"

    job(size, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})


def test_a_closure_runs_first_and_its_loss_comes_back(job: Any) -> None:
    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch(hvd.rank(), 0)[0]), batch(hvd.rank(), 0)[1])
            loss.backward()
            return loss

        before = nn.functional.mse_loss(model(batch(hvd.rank(), 0)[0]), batch(hvd.rank(), 0)[1])
        assert optimizer.step(closure) == before
        sgd = OPTIMIZERS["sgd"]
        for p, wanted in zip(model.parameters(), simulated(2, sgd, 1, 1), strict=True):
            torch.testing.assert_close(p.detach(), wanted)
        optimizer.zero_grad()
        assert optimizer.step() is None

    job(2, check)


def test_unused_frozen_shared_and_later_parameters_are_the_same_on_all_ranks(job: Any) -> None:
    def check() -> None:
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        used_by_0, frozen, later = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        frozen.requires_grad_(False)
        start = used_by_0.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*shared.parameters(), *used_by_0.parameters(), *frozen.parameters()], lr=0.1),
            op=hvd.Adasum,
        )
        optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.2})
        for step in range(2):
            x = batch(hvd.rank(), step)[1].float()
            optimizer.zero_grad()
            y = later(frozen(shared(shared(x))))
            (used_by_0(y) if hvd.rank() == 0 else y).square().mean().backward()
            own = None if used_by_0.weight.grad is None else used_by_0.weight.grad.clone()
            optimizer.step()
            gradient = hvd.broadcast(torch.zeros(4, 4) if own is None else own, 0)
            if step == 0:  # the only rank that has a say
                torch.testing.assert_close(used_by_0.weight.detach(), start - 0.1 * gradient)
        for module in (shared, used_by_0, frozen, later):
            everybodys = hvd.allgather(module.weight.detach().reshape(1, -1))
            assert (everybodys == everybodys[0]).all()

    job(3, check)


def test_a_dropped_optimizer_is_gone_at_once(job: Any) -> None:
    def check() -> None:
        import gc

        model = network()
        gc.disable()
        try:
            for _ in range(3):  # each in place of the last: only one may listen to the parameters
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
            for p in model.parameters():
                assert len(p._post_accumulate_grad_hooks) == 1
            model(batch(0, 0)[0]).square().mean().backward()
            optimizer.step()
            del optimizer
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        finally:
            gc.enable()

    job(2, check)


def test_compressed_differences_train_close_to_uncompressed_ones(job: Any) -> None:
    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum, compression=hvd.Compression.bf16
        )
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(hvd.rank(), step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        for p, wanted in zip(model.parameters(), simulated(2, OPTIMIZERS["sgd"], 3, 1), strict=True):
            assert p.dtype == torch.float64
            torch.testing.assert_close(p.detach(), wanted, rtol=0.01, atol=0.003)

    job(2, check)


def test_wrong_arguments_and_calls_of_the_optimizer_are_refused(job: Any) -> None:
    def check(sets: Any) -> None:
        model = network()

        def wrap(**arguments: Any) -> Any:
            kind = arguments.pop("kind", torch.optim.SGD)
            return hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), op=hvd.Adasum, **arguments)

        with pytest.raises(NotImplementedError, match="process_set"):
            wrap(process_set=sets[0])
        with pytest.raises(NotImplementedError, match="LBFGS"):
            wrap(kind=torch.optim.LBFGS)
        with pytest.raises(ValueError, match="predivide"):
            wrap(gradient_predivide_factor=2.0)
        with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
            wrap(backward_passes_per_step=0)
        optimizer = wrap()
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer)
        with pytest.raises(
            AssertionError, match="Skipping synchronization is not supported when using Adasum optimizer"
        ):
            optimizer.skip_synchronize()
        loss = model(batch(hvd.rank(), 0)[0]).square().mean()
        loss.backward(retain_graph=True)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            model(batch(hvd.rank(), 0)[0]).square().mean().backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "moved before step()"
        optimizer.step()
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()

    job(2, check, sets=[[0]])


def test_it_learns_the_digits(job: Any) -> None:
    def learn() -> tuple[digits.Outcome, digits.Outcome]:
        def wrap(op: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
            return lambda model: hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=op
            )

        return digits.train(wrap(hvd.Average)), digits.train(wrap(hvd.Adasum))

    outcomes = job(2, learn)
    average, adasum = outcomes[0]
    assert outcomes[1] == outcomes[0], "the same bits on every rank"
    assert average.accuracy > 0.9
    assert adasum.accuracy > average.accuracy - 0.02
    assert adasum.loss < 1.1 * average.loss
