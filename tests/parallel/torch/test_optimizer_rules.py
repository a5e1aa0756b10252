"""What DistributedOptimizer refuses, warns of, and promises about itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.core.errors import HorovodInternalError
from parallel.torch.sent_gradients import sent_gradients, submitted
from time_limits import SOON


def test_before_init_the_error_says_to_call_init() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises((HorovodInternalError, ValueError), match=r"not been initialized; use hvd\.init\(\)"):
        hvd.DistributedOptimizer(optimizer)


def test_a_distributed_optimizer_is_of_the_wrapped_class(job: Any) -> None:
    def check() -> None:
        parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]

        class Mine(torch.optim.AdamW):
            def greet(self) -> str:
                return f"lr {self.param_groups[0]['lr']}"

        original = Mine(parameters, lr=0.125)
        optimizer = hvd.DistributedOptimizer(
            original,
            zip(["a", "b"], parameters, strict=True),
            backward_passes_per_step=2,
            gradient_predivide_factor=2.0,
        )
        assert isinstance(optimizer, Mine) and isinstance(optimizer, torch.optim.Optimizer)
        assert type(optimizer).__name__ == "Mine" and type(optimizer).__module__ == "horovod.torch.optimizer"
        assert optimizer.greet() == "lr 0.125"
        assert optimizer.param_groups is original.param_groups and optimizer.defaults == original.defaults
        assert "Mine" in repr(optimizer)
        assert optimizer.op == hvd.Average and optimizer.gradient_predivide_factor == 2.0
        assert optimizer.sparse_as_dense is False and optimizer.process_set is hvd.global_process_set
        assert optimizer.backward_passes_per_step == 2
        assert {name: p is parameters["ab".index(name)] for p, name in optimizer._parameter_names.items()} == {
            "a": True,
            "b": True,
        }

    job(2, check)
    job(1, check)


def test_calls_in_a_wrong_order_are_refused(job: Any) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))

        def backward() -> None:
            (parameter * (hvd.rank() + 1)).sum().backward()

        backward()
        assert parameter.grad.tolist() == [1.5, 1.5]  # reduced
        backward()
        assert parameter.grad.tolist() == [3.0, 3.0]  # each pass adds its average
        optimizer.zero_grad()  # a gradient scaler that skips a step leaves it to that
        backward()
        optimizer.step()
        optimizer.zero_grad()
        parameter.data.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backward()
            optimizer.step()
            assert parameter.tolist() == [-1.5, -1.5]
            optimizer.zero_grad(set_to_none=False)
            assert parameter.grad.tolist() == [0.0, 0.0]
            backward()
            optimizer.synchronize()
            assert parameter.grad.tolist() == [1.5, 1.5]
            with optimizer.skip_synchronize():
                optimizer.step()
            assert parameter.tolist() == [-3.0, -3.0]
            optimizer.zero_grad(set_to_none=True)
            assert parameter.grad is None
            backward()
            optimizer.step()
            optimizer.zero_grad()
        backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
            optimizer.step()
        assert parameter.tolist() == [-6.0, -6.0]  # reduced once only
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backward()
            optimizer.step()
        assert parameter.tolist() == [-7.5, -7.5]

    job(2, check)


def test_a_step_without_gradients_changes_nothing_and_a_lone_gradient_is_averaged(job: Any) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        optimizer.step()
        assert parameter.tolist() == [1.0, 1.0]
        optimizer.zero_grad()
        if hvd.rank() == 0:
            parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [0.5, 0.5]

    job(2, check)


@pytest.mark.parametrize("synchronizes", [False, True])
def test_the_warning_about_gradients_that_were_set_and_changed_names_the_line_that_steps(
    job: Any, synchronizes: bool
) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.ones(3))
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        parameter.grad = torch.ones(3)
        parameter.grad.mul_(0.5)
        with pytest.warns(UserWarning, match="set by the script and then changed") as caught:
            optimizer.synchronize() if synchronizes else optimizer.step()
        assert caught[0].filename.endswith("test_optimizer_rules.py")

    job(2, check)


@pytest.mark.parametrize("are_of_backward", [False, True])
def test_gradients_that_are_zero_have_no_such_warning(job: Any, are_of_backward: bool) -> None:
    def check() -> None:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        for parameter in parameters:
            if are_of_backward:
                parameter.sum().backward()
            else:
                parameter.grad = torch.ones(3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        optimizer.zero_grad(set_to_none=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert [parameter.tolist() for parameter in parameters] == [[1.0] * 3] * 2

    job(2, check)


def test_gradients_are_reduced_where_they_are(job: Any) -> None:
    def check() -> None:
        model = nn.Linear(300, 300)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        model(torch.ones(1, 300)).sum().backward()
        before = [p.grad.data_ptr() for p in model.parameters()]
        optimizer.synchronize()
        assert [p.grad.data_ptr() for p in model.parameters()] == before
        with optimizer.skip_synchronize():
            optimizer.step()

    job(2, check)


class Wait(torch.autograd.Function):
    """Waits, in backward, until a gradient of this pass is reduced; ``seen`` gets whether that came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[bool]) -> torch.Tensor:
        ctx.seen, ctx.before = seen, submitted()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        import time

        def reduced() -> bool:
            return any(each.ended and not each.error for each in sent_gradients(ctx.before))

        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline and not reduced():
            time.sleep(0.001)  # the reduction runs on another thread
        ctx.seen.append(reduced())
        return grads[0], None


def test_communication_starts_during_backward(job: Any) -> None:
    """The last layer's gradient is reduced while the first layer's pass is still under way."""

    def check() -> bool:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.ModuleList([first, last])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        seen: list[bool] = []
        last(Wait.apply(first(torch.ones(1, 4)), seen)).sum().backward()
        optimizer.step()
        return seen[0]

    assert job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"}) == [True, True]


def test_one_optimizer_is_reduced_while_backward_goes_on_to_the_parameters_of_another(job: Any) -> None:
    def check() -> list[bool]:
        import time

        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (first, last)]
        seen: list[bool] = []
        for _ in range(2):  # the second step sends the requests of the first one again
            for optimizer in optimizers:
                optimizer.zero_grad()
            last(Wait.apply(first(torch.ones(1, 4)), seen)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            time.sleep(0.3)  # so that the worker thread sleeps when the next step begins; the test holds if it does not
        return seen

    assert job(2, check) == [[True, True]] * 2


def test_ranks_whose_models_differ_get_an_error_that_names_the_line(job: Any) -> None:
    """The error names the parameter and both ranks' lines, and comes on both."""

    def check() -> str:
        model = nn.Sequential(nn.Linear(3, 3 + hvd.rank()), nn.Linear(3 + hvd.rank(), 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return "not reached"

    def catch() -> str:
        with pytest.raises(HorovodInternalError) as error:
            check()
        return str(error.value)

    for text in job(2, catch):
        assert "which this rank does not have" in text and "test_optimizer_rules.py:" in text


def test_a_failure_in_the_middle_of_training_can_be_survived(job: Any) -> None:
    """One rank disagrees once; both see the error, and the next step is as if nothing had been."""

    def check() -> list[float]:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(HorovodInternalError, match="Mismatched data types"):
            parameter.grad = torch.ones(2, dtype=torch.float32)
            if hvd.rank() == 0:
                with torch.no_grad():
                    parameter.data = parameter.data.double()
                    parameter.grad = torch.ones(2, dtype=torch.float64)
            optimizer.synchronize()
        if hvd.rank() == 0:
            parameter.data = parameter.data.float()
        optimizer.zero_grad(set_to_none=True)
        parameter.sum().backward()
        optimizer.step()
        return parameter.tolist()

    assert job(2, check) == [[-2.0, -2.0]] * 2


def test_a_parameter_that_gets_another_type_is_reduced_in_that_type(job: Any) -> None:
    def check() -> None:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=dtype)) * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
        assert model.weight.tolist() == [[-4.5, -4.5, -4.5]]

    job(2, check)
