"""``hvd.Compression.int8`` and ``int4``, and HOROVOD_COMPRESSION: operations and optimizers between pretended hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.buckets import ROUNDED_OFF
from horovod.torch.optimizer.compressor_state import MEMORY
from jobs import Job
from process_groups import run_in_group
from ranks import RankPool

LENGTH = 10_000


def gradient(rank: int, length: int = LENGTH) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).normal(size=length).astype(np.float32))


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aab"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_allreduce_between_hosts_is_close_and_the_same_everywhere(job: Job, hosts: str, form: str) -> None:
    exact = np.mean([gradient(rank).double().numpy() for rank in range(len(hosts))], axis=0)

    def one() -> Any:
        compression = getattr(hvd.Compression, form)
        single = hvd.allreduce(gradient(hvd.rank()), name="single", compression=compression)
        few, whole, again = hvd.grouped_allreduce(
            [torch.ones(10), torch.full((5000,), hvd.rank(), dtype=torch.int64), gradient(hvd.rank())],
            compression=compression,
        )
        assert few.tolist() == [1] * 10
        assert whole[0] == sum(range(hvd.size())) // hvd.size()
        np.testing.assert_array_equal(again.numpy(), single.numpy())
        return single.numpy()

    first, *others = job(len(hosts), one, hosts=hosts)
    assert 0 < np.abs(first - exact).max() < {"int8": 0.05, "int4": 0.8}[form]
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_on_one_host_nothing_is_compressed(job: Job) -> None:
    def one() -> None:
        for compression in (hvd.Compression.none, hvd.Compression.int8):
            found = hvd.allreduce(gradient(hvd.rank()), op=hvd.Sum, compression=compression)
            np.testing.assert_array_equal(found.numpy(), (gradient(0) + gradient(1)).numpy())
        _, optimizer = trained(hvd.Compression.int8, 1)
        assert not optimizer.state_dict()[MEMORY]["own"]

    job(2, one, hosts="aa", env={"HOROVOD_COMPRESSION": "int8"})


def test_the_setting_compresses_sums_of_scripts_that_choose_nothing(job: Job) -> None:
    def one() -> None:
        own, exact = gradient(hvd.rank()), (gradient(0) + gradient(1)).numpy()
        assert np.abs(hvd.allreduce(own, op=hvd.Sum).numpy() - exact).max() > 0
        np.testing.assert_array_equal(
            hvd.allreduce(own, op=hvd.Max).numpy(), np.maximum(gradient(0), gradient(1)).numpy()
        )
        halved = hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16)
        np.testing.assert_array_equal(halved.numpy(), (gradient(0).half() + gradient(1).half()).float().numpy())
        vector = gradient(hvd.rank())
        hvd.broadcast_(vector, 1)
        np.testing.assert_array_equal(vector.numpy(), gradient(1).numpy())

    job(2, one, hosts="ab", env={"HOROVOD_COMPRESSION": "int8"})


def test_ranks_that_choose_differently_are_told(job: Job) -> None:
    def one() -> str:
        chosen = [hvd.Compression.int8, hvd.Compression.none][hvd.rank()]
        with pytest.raises(
            MismatchError, match="One rank compresses with int8, but another rank compresses with none"
        ) as found:
            hvd.allreduce(gradient(0), name="this", compression=chosen)
        assert "compressed with int8" in str(found.value)
        return str(found.value)

    job(2, one, hosts="ab")


def test_other_reductions_are_refused_before_anything_is_sent(job: Job) -> None:
    def one() -> None:
        for op in (hvd.Max, hvd.Adasum):
            with pytest.raises(ValueError, match="compresses sums"):
                hvd.allreduce(gradient(0), op=op, compression=hvd.Compression.int8)
        with pytest.raises(ValueError, match="is for allreduces and optimizers"):
            hvd.reducescatter(gradient(0), compression=hvd.Compression.int8)
        with pytest.raises(ValueError, match="compresses sums"):
            hvd.DistributedOptimizer(
                torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1),
                op=hvd.Adasum,
                compression=hvd.Compression.int4,
            )

    job(2, one, hosts="ab")


def trained(compression: Any, steps: int, rate: float = 0.01, model: Any = None, state: Any = None) -> tuple[Any, Any]:
    """A linear model whose gradient is the same in every step, with its optimizer."""
    if model is None:
        model = torch.nn.Linear(LENGTH, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        optimizer.zero_grad()
        model(gradient(hvd.rank())).sum().backward()
        optimizer.step()
    return model, optimizer


def test_gradients_that_are_divided_before_the_sum_come_out_alike(job: Job) -> None:
    def one() -> Any:
        found = []
        for predivide in (1.0, 2.0):
            model = torch.nn.Linear(LENGTH, 1)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                named_parameters=model.named_parameters(),
                compression=hvd.Compression.int8,
                gradient_predivide_factor=predivide,
            )
            for _ in range(3):
                optimizer.zero_grad()
                model(gradient(hvd.rank())).sum().backward()
            found.append(model.weight.grad.numpy())
        return found

    for plain, divided in job(2, one, hosts="ab"):
        np.testing.assert_array_equal(plain, divided)  # a factor of 2 changes no rounding


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_an_optimizer_adds_what_was_rounded_away_to_the_next_step(job: Job, hosts: str) -> None:
    steps = 30
    exact = -0.01 * steps * np.mean([gradient(rank).double().numpy() for rank in range(len(hosts))], axis=0)

    def one() -> tuple[float, Any]:
        model, _ = trained(hvd.Compression.int4, steps)
        once, _ = trained(hvd.Compression.int4, 1)
        error = np.abs(once.weight.detach().numpy()[0] - exact / steps).max()
        return error, model.weight.detach().numpy()[0]

    found = job(len(hosts), one, hosts=hosts)
    for error, weight in found:
        assert np.abs(weight - exact).max() < 5 * error  # without feedback it would be up to 30 times
        np.testing.assert_array_equal(weight, found[0][1])


def test_a_resumed_optimizer_goes_on_as_if_nothing_had_happened(job: Job) -> None:
    def one() -> None:
        whole, _ = trained(hvd.Compression.int8, 6)
        model, optimizer = trained(hvd.Compression.int8, 3)
        state = optimizer.state_dict()
        kept = state[MEMORY]["own"]["weight"][ROUNDED_OFF]
        assert kept.abs().max() > 0
        del optimizer
        model, _ = trained(hvd.Compression.int8, 3, model=model, state=state)
        np.testing.assert_array_equal(model.weight.detach().numpy(), whole.weight.detach().numpy())

    job(2, one, hosts="ab")


def test_an_unchanged_script_trains_with_the_setting(job: Job) -> None:
    def one() -> Any:
        model, optimizer = trained(hvd.Compression.none, 3)
        assert ROUNDED_OFF in optimizer.state_dict()[MEMORY]["own"]["weight"]
        return model.weight.detach().numpy()

    first, second = job(2, one, hosts="ab", env={"HOROVOD_COMPRESSION": "int8"})
    np.testing.assert_array_equal(first, second)


def test_a_rank_that_has_joined_contributes_zeros(job: Job) -> None:
    def one() -> Any:
        if hvd.rank() == 2:
            hvd.join()
            return None
        found = hvd.allreduce(gradient(hvd.rank()), name="rest", op=hvd.Sum, compression=hvd.Compression.int8)
        hvd.join()
        return found.numpy()

    first, second, _ = job(3, one, hosts="abc")
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - (gradient(0) + gradient(1)).numpy()).max() < 0.1


def test_a_process_set_on_one_host_is_not_compressed_in_a_job_of_several(job: Job) -> None:
    def one() -> None:
        assert running().workers[0].executor.compresses
        here = hvd.add_process_set([0, 1])
        if here.included():
            found = hvd.allreduce(gradient(hvd.rank()), op=hvd.Sum, compression=hvd.Compression.int8, process_set=here)
            np.testing.assert_array_equal(found.numpy(), (gradient(0) + gradient(1)).numpy())

    job(3, one, hosts="aab", env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def test_ddp_compresses_its_buckets_and_no_call_of_the_script(ranks: Callable[..., RankPool]) -> None:
    steps, rate = 20, 0.01
    exact = -rate * steps * (gradient(0).double() + gradient(1).double()).numpy() / 2

    def one() -> Any:
        import torch.distributed as dist

        own = gradient(dist.get_rank())
        total = own.clone()
        dist.all_reduce(total)
        np.testing.assert_array_equal(total.numpy(), (gradient(0) + gradient(1)).numpy())
        model = torch.nn.Linear(LENGTH, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        trained = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            trained(own).sum().backward()
            optimizer.step()
        return model.weight.detach().numpy()[0]

    pool = ranks(2, {"HOROVOD_COMPRESSION": "int8"}, "torch")
    first, second = run_in_group(pool, one, hosts="ab")
    np.testing.assert_array_equal(first, second)
    assert 0 < np.abs(first - exact).max() < 3 * rate * gradient(0).abs().max().item() / 100


def test_broadcast_state_keeps_what_each_rank_has_rounded_away(job: Job) -> None:
    def one() -> None:
        _, optimizer = trained(hvd.Compression.int8, 3)
        before = optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF].clone()
        hvd.broadcast_optimizer_state(optimizer, 0)
        after = optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF]
        np.testing.assert_array_equal(before.numpy(), after.numpy())
        assert len(hvd.allgather(before.abs().sum()[None]).unique()) == 2

    job(2, one, hosts="ab")


def test_elastic_state_goes_back_together_with_what_was_rounded_away(job: Job) -> None:
    def one() -> None:
        model, optimizer = trained(hvd.Compression.int8, 2)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        state.commit()
        kept = optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF].clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(gradient(hvd.rank())).sum().backward()
            optimizer.step()
        assert (optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF] != kept).any()
        state.restore()
        np.testing.assert_array_equal(
            optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF].numpy(), kept.numpy()
        )

    job(2, one, hosts="ab")


def test_an_overflow_reaches_a_gradient_scaler_and_leaves_nothing_behind(job: Job) -> None:
    def one() -> None:
        model, optimizer = trained(hvd.Compression.int8, 1)
        optimizer.zero_grad()
        own = gradient(hvd.rank())
        if hvd.rank() == 1:
            own[7] = torch.inf
        model(own).sum().backward()
        assert model.weight.grad.isnan().sum() == 256
        assert optimizer.state_dict()[MEMORY]["own"]["weight"][ROUNDED_OFF].isfinite().all()

    job(2, one, hosts="ab")


def test_local_training_compresses_what_the_hosts_average(job: Job) -> None:
    def one() -> Any:
        model = torch.nn.Linear(LENGTH, 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = hvd.LocalOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            every=2,
            outer=hvd.OuterSGD(lr=1, momentum=0, nesterov=False),
            fragments=1,
            compression=hvd.Compression.int8,
            named_parameters=model.named_parameters(),
        )
        for _ in range(4):
            optimizer.zero_grad()
            model(gradient(hvd.rank())).sum().backward()
            optimizer.step()
        optimizer.finish_round()
        assert any(ROUNDED_OFF in each for each in optimizer.state_dict()[MEMORY]["own"].values())
        return model.weight.detach().numpy()[0]

    first, *others = job(4, one, hosts="aabb")
    exact = -0.01 * 4 * np.mean([gradient(rank).double().numpy() for rank in range(4)], axis=0)
    assert 0 < np.abs(first - exact).max() < 0.01
    for other in others:
        np.testing.assert_array_equal(other, first)
