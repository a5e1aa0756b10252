"""DistributedOptimizer trains as one process would on all ranks' batches together.

Each test trains on every rank and, without Horovod, in one process on the concatenated batch; the parameters must agree
to float32 rounding, and be the same bits on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import MAKERS, alone, assert_close, assert_same_on_all_ranks, batches, network, train


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_equals_one_process_with_all_data(job: Any, size: int) -> None:
    def check() -> None:
        for maker in ("momentum", "adam"):
            for wrapping in (
                {},
                {"groups": 2},
                {"groups": 100},
                {"gradient_predivide_factor": 4.0},
                {"named": False},
            ):
                model = network()
                keywords = dict(wrapping)
                if keywords.pop("named", True):
                    keywords["named_parameters"] = model.named_parameters()
                optimizer = hvd.DistributedOptimizer(MAKERS[maker](model.parameters()), **keywords)
                train(model, optimizer, batches(5, size, hvd.rank()))
                assert_close(model, alone(maker, 5, size))
                assert_same_on_all_ranks(model)

    job(size, check)
    if size == 3:
        job(size, check, env={"HOROVOD_BUCKET_BYTES": "1"})  # a bucket for every parameter


def test_chosen_groups_train_as_one_process_does_and_num_groups_is_deprecated(job: Any) -> None:
    def check() -> None:
        for choice in range(3):
            model = network()
            weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
            biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
            groups = [[weights, biases], [weights], [[weights[2], biases[0]], []]][choice]
            optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), groups=groups)
            train(model, optimizer, batches(4, 2, hvd.rank()))
            assert_close(model, alone("sgd", 4, 2))
        model = network()
        with pytest.warns(DeprecationWarning, match="num_groups"):
            optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), num_groups=2)
        train(model, optimizer, batches(4, 2, hvd.rank()))
        assert_close(model, alone("sgd", 4, 2))

    job(2, check)


def test_gradients_of_several_passes_are_summed_as_in_one_process(job: Any) -> None:
    """Gradients of the passes are summed, not averaged, as in one process."""

    def check() -> None:
        data, whole = list(batches(6, 2, hvd.rank())), list(batches(6, 2))
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model.parameters()), backward_passes_per_step=3)
        assert optimizer.backward_passes_per_step == 3
        other = MAKERS["momentum"](wanted.parameters())
        for _ in range(2):
            for start in (0, 3):
                for which, stepper, source in ((model, optimizer, data), (wanted, other, whole)):
                    stepper.zero_grad()
                    for x, y in source[start : start + 3]:
                        nn.functional.mse_loss(which(x), y).backward()
                    stepper.step()
            assert_close(model, wanted)
        optimizer.set_backward_passes_per_step(1)
        train(model, optimizer, iter(data))
        train(wanted, other, iter(whole))
        assert_close(model, wanted)
        assert_same_on_all_ranks(model)

    job(2, check)


def test_a_step_before_all_passes_are_through_reduces_what_has_accumulated(job: Any) -> None:
    """As at the end of an epoch: what has accumulated so far is reduced."""

    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), backward_passes_per_step=5)
        train(model, optimizer, batches(3, 2, hvd.rank()))
        train(wanted, MAKERS["sgd"](wanted.parameters()), batches(3, 2))
        assert_close(model, wanted)

    job(2, check)


def test_gradients_are_reduced_with_the_chosen_op(job: Any) -> None:
    def check() -> None:
        for op, wanted in ((hvd.Sum, 3.0), (hvd.Average, 1.5), (hvd.Min, 1.0), (hvd.Max, 2.0), (hvd.Product, 2.0)):
            parameter = nn.Parameter(torch.zeros(3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
            (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            assert parameter.tolist() == [-wanted] * 3
            assert optimizer.op == op

    job(2, check)


class Branches(nn.Module):
    """Rank and step decide which parameters a pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum(self.parts[i](x) for i in chosen)


def test_parameters_that_some_ranks_do_not_use_count_as_zeros_there(job: Any) -> None:
    def check() -> None:
        model, wanted = Branches(), Branches()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        other = torch.optim.SGD(wanted.parameters(), lr=0.1)
        for step, data in enumerate(zip(*[list(batches(6, 3, rank)) for rank in range(3)], strict=True)):
            chosen = [[step % 3], [0, step % 2], [2]]  # part 3 is used by nobody
            optimizer.zero_grad()
            x, y = data[hvd.rank()]
            nn.functional.mse_loss(model(x, chosen[hvd.rank()]), y).backward()
            optimizer.step()
            other.zero_grad()
            for rank, (x, y) in enumerate(data):
                (nn.functional.mse_loss(wanted(x, chosen[rank]), y) / 3).backward()
            other.step()
            assert_close(model, wanted)
        assert_same_on_all_ranks(model)

    job(3, check)
    job(3, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_frozen_parameters_stay_as_they_are_and_unfrozen_ones_train_again(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        for which in (model, wanted):
            which[0].weight.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        train(model, optimizer, batches(3, 2, hvd.rank()))
        other = MAKERS["adam"](wanted.parameters())
        train(wanted, other, batches(3, 2))
        assert model[0].weight.grad is None
        for which in (model, wanted):
            which[4].bias.requires_grad_(False)  # frozen while training goes on
        train(model, optimizer, batches(3, 2, hvd.rank()))
        train(wanted, other, batches(3, 2))
        for which in (model, wanted):
            which[4].bias.requires_grad_(True)
        train(model, optimizer, batches(3, 2, hvd.rank()))
        train(wanted, other, batches(3, 2))
        assert_close(model, wanted)

    job(2, check)


def test_a_weight_that_two_layers_share_trains_as_in_one_process(job: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.one = nn.Linear(6, 6)
            self.two = nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.two(self.one(x).tanh()))

    def check() -> None:
        model, wanted = Tied(), Tied()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        train(model, optimizer, batches(5, 2, hvd.rank()))
        train(wanted, MAKERS["adam"](wanted.parameters()), batches(5, 2))
        assert_close(model, wanted)

    job(2, check)


def test_a_module_called_twice_in_one_pass_trains_as_in_one_process(job: Any) -> None:
    """A module called twice in one pass has one gradient, and one hook call."""

    def check() -> None:
        model, wanted = nn.Linear(6, 6), nn.Linear(6, 6)
        wanted.load_state_dict(hvd.broadcast_object(model.state_dict(), 0, "start"))
        model.load_state_dict(wanted.state_dict())
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        other = MAKERS["sgd"](wanted.parameters())
        for (x, _), (all_x, _) in zip(batches(3, 2, hvd.rank()), batches(3, 2), strict=True):
            optimizer.zero_grad()
            model(model(x).tanh()).square().mean().backward()
            optimizer.step()
            other.zero_grad()
            wanted(wanted(all_x).tanh()).square().mean().backward()
            other.step()
        assert_close(model, wanted)

    job(2, check)


def test_two_models_of_the_same_names_and_shapes_do_not_mix_their_gradients(job: Any) -> None:
    """Same shapes, same names: a gradient belongs to its optimizer. Their backward passes may overlap."""

    def check() -> None:
        models, wanted = [network(), network()], [network(), network()]
        for pair in (models, wanted):
            with torch.no_grad():
                pair[1][0].weight.mul_(2.0)
        optimizers = [hvd.DistributedOptimizer(MAKERS["adam"](m.parameters()), m.named_parameters()) for m in models]
        others = [MAKERS["adam"](model.parameters()) for model in wanted]
        for (x, y), (all_x, all_y) in zip(batches(4, 2, hvd.rank()), batches(4, 2), strict=True):
            for optimizer in (*optimizers, *others):
                optimizer.zero_grad()
            for which, a, b in ((models, x, y), (wanted, all_x, all_y)):
                first = nn.functional.mse_loss(which[0](a), b)
                second = nn.functional.mse_loss(which[1](a), 2 * b)
                first.backward()
                second.backward()
            for optimizer in (*reversed(optimizers), *others):
                optimizer.step()
        for model, other in zip(models, wanted, strict=True):
            assert_close(model, other)

    job(2, check)


def test_two_optimizers_train_the_two_parts_of_one_model(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model[0].named_parameters()),
            hvd.DistributedOptimizer(torch.optim.Adam(model[2:].parameters(), lr=0.01, eps=1e-4)),
        ]
        others = [
            torch.optim.SGD(wanted[0].parameters(), lr=0.1),
            torch.optim.Adam(wanted[2:].parameters(), lr=0.01, eps=1e-4),
        ]
        for which, steppers, data in ((model, optimizers, batches(4, 2, hvd.rank())), (wanted, others, batches(4, 2))):
            for x, y in data:
                for stepper in steppers:
                    stepper.zero_grad()
                nn.functional.mse_loss(which(x), y).backward()
                for stepper in steppers:
                    stepper.step()
        assert_close(model, wanted)

    job(2, check)


def test_a_step_with_a_closure_trains_as_in_one_process_and_returns_its_loss(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
        other = MAKERS["sgd"](wanted.parameters())

        def closure(which: nn.Module, stepper: Any, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
            def evaluate() -> torch.Tensor:
                stepper.zero_grad()
                loss = nn.functional.mse_loss(which(x), y)
                loss.backward()
                return loss

            return evaluate

        for (x, y), (all_x, all_y) in zip(batches(3, 2, hvd.rank()), batches(3, 2), strict=True):
            before = nn.functional.mse_loss(model(x), y)
            assert torch.equal(optimizer.step(closure(model, optimizer, x, y)), before)
            other.step(closure(wanted, other, all_x, all_y))
        assert_close(model, wanted)

    job(2, check)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_steers_whether_made_before_or_after_wrapping(job: Any, when: str) -> None:
    """Made for the original or for the wrapped optimizer: they steer the same parameter groups."""

    def check() -> None:
        model, wanted = network(), network()
        optimizer = MAKERS["momentum"](model.parameters())
        if when == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if when == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        other = MAKERS["momentum"](wanted.parameters())
        other_scheduler = torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.1)
        for (x, y), (all_x, all_y) in zip(batches(6, 2, hvd.rank()), batches(6, 2), strict=True):
            train(model, optimizer, iter([(x, y)]))
            scheduler.step()
            train(wanted, other, iter([(all_x, all_y)]))
            other_scheduler.step()
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        assert_close(model, wanted)

    job(2, check)


def test_a_saved_state_dictionary_continues_training_with_and_without_horovod(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        other = MAKERS["adam"](wanted.parameters())
        train(model, optimizer, batches(3, 2, hvd.rank()))
        train(wanted, other, batches(3, 2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert saved[1].keys() == other.state_dict().keys()
        train(model, optimizer, batches(3, 2, hvd.rank()))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # PyTorch keeps the tensors it is given
        train(model, optimizer, batches(2, 2, hvd.rank()))
        plain = network()
        plain.load_state_dict(saved[0])  # and a checkpoint fits an optimizer without Horovod, and the other way round
        plain_optimizer = MAKERS["adam"](plain.parameters())
        plain_optimizer.load_state_dict(saved[1])
        train(plain, plain_optimizer, batches(2, 2))
        train(wanted, other, batches(2, 2))
        assert_close(model, wanted)
        assert_close(plain, wanted)

    job(2, check)


def test_loading_a_state_dictionary_abandons_the_step_under_way(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["adam"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        saved = copy.deepcopy(optimizer.state_dict())
        x, y = next(batches(1, 2, hvd.rank()))
        nn.functional.mse_loss(model(x), y).backward()  # one of two passes
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        for _ in range(2):
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.load_state_dict(saved)  # while gradients are on their way
        optimizer.zero_grad()
        for _ in range(2):
            nn.functional.mse_loss(model(x) / 2**0.5, y / 2**0.5).backward()
        optimizer.step()
        train(wanted, MAKERS["adam"](wanted.parameters()), batches(1, 2))
        assert_close(model, wanted)

    job(2, check)


def test_state_from_before_wrapping_is_kept(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        plain, other = MAKERS["adam"](model.parameters()), MAKERS["adam"](wanted.parameters())
        train(model, plain, batches(2, 2))
        train(wanted, other, batches(2, 2))
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
        train(model, optimizer, batches(2, 2, hvd.rank()))
        train(wanted, other, batches(2, 2))
        assert_close(model, wanted)

    job(2, check)


def test_channels_last_models_train_as_in_one_process_and_keep_their_layout(job: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 3))

    def run(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def check() -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 3, 6, 6, generator=generator)
        mine = x[2 * hvd.rank() : 2 * hvd.rank() + 2].contiguous(memory_format=torch.channels_last)
        for compression in (hvd.Compression.none, hvd.Compression.bf16):
            model, wanted = build().to(memory_format=torch.channels_last), build()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
            )
            run(model, optimizer, mine)
            run(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1), x)
            assert not model[0].weight.grad.is_contiguous()
            rtol = 1e-4 if compression is hvd.Compression.none else 2e-2
            for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
                assert torch.allclose(one, two, rtol=rtol, atol=rtol / 10)
            assert_same_on_all_ranks(model)

    job(2, check)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_mixed_types_train_as_one_process_and_keep_their_types(job: Any, dtype: torch.dtype) -> None:
    def check() -> None:
        model, wanted = network().to(dtype), network().to(dtype)
        model[4].float()  # mixed types travel in separate buckets
        wanted[4].float()

        def run(which: nn.Module, optimizer: Any, data: Any) -> None:
            for x, y in data:
                optimizer.zero_grad()
                nn.functional.mse_loss(which[4](which[:4](x.to(dtype)).float()), y).backward()
                optimizer.step()

        run(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), batches(3, 2, hvd.rank()))
        run(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1), batches(3, 2))
        for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
            assert one.dtype == two.dtype and torch.allclose(one, two, atol=2e-2 if dtype == torch.bfloat16 else 1e-7)
        assert_same_on_all_ranks(model)

    job(2, check)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression_trains_close_to_one_process_and_gradients_keep_their_type(job: Any, name: str) -> None:
    def check() -> None:
        compression = getattr(hvd.Compression, name)
        model = network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["sgd"](model.parameters()), model.named_parameters(), compression=compression
        )
        train(model, optimizer, batches(5, 2, hvd.rank()))
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        wanted = alone("sgd", 5, 2)
        for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(one, two, rtol=2e-2, atol=2e-3)
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6) == (name == "none") or one.numel() < 10
        assert_same_on_all_ranks(model)

    job(2, check)


def test_a_compressor_of_the_users_own_is_applied_and_undone(job: Any) -> None:
    class Halves(hvd.Compression.none):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor.double() * 2, tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return (tensor / 2).to(ctx)

    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), compression=Halves)
        train(model, optimizer, batches(3, 2, hvd.rank()))
        assert_close(model, alone("sgd", 3, 2))

    job(2, check)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_train_as_in_one_process_and_stay_sparse(job: Any, as_dense: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        return nn.ModuleDict({"words": nn.Embedding(20, 5, sparse=True), "out": nn.Linear(5, 3)})

    def run(model: nn.Module, optimizer: Any, words: torch.Tensor) -> None:
        for row in words:
            optimizer.zero_grad()
            model["out"](model["words"](row)).square().mean().backward()
            optimizer.step()

    def check() -> None:
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(0, 20, (4, 2 * 6), generator=generator)  # some words twice, some on both ranks
        for op, lr in ((hvd.Average, 0.5), (hvd.Sum, 0.25)):
            model, wanted = build(), build()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), sparse_as_dense=as_dense, op=op
            )
            run(model, optimizer, words[:, 6 * hvd.rank() : 6 * hvd.rank() + 6])
            run(wanted, torch.optim.SGD(wanted.parameters(), lr=0.5), words)
            assert_close(model, wanted)
            assert_same_on_all_ranks(model)
            assert model["words"].weight.grad.is_sparse

    job(2, check)


def test_a_rank_without_a_sparse_gradient_applies_those_of_the_others(job: Any) -> None:
    def check() -> None:
        torch.manual_seed(4)
        words = nn.Embedding(6, 2, sparse=True)
        before = words.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0))
        words(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hvd.rank() == 0:
            words(torch.tensor([5])).sum().backward()
        optimizer.step()  # rank 1 has no gradient this time
        before[:2] -= 0.5
        before[5] -= 0.5
        assert torch.allclose(words.weight, before)

    job(2, check)


def test_sparse_allreduce_adds_up_the_rows_of_all_ranks(job: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        indices = torch.tensor([[0, rank + 1, rank + 1]])
        tensor = torch.sparse_coo_tensor(indices, torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), (5, 2))
        wait = hvd.sparse_allreduce_async(tensor, name="sparse", op=hvd.Sum)
        found = wait()
        assert found.is_sparse and found.shape == (5, 2)
        assert found.to_dense()[:, 0].tolist() == [2.0, 5.0, 5.0, 0.0, 0.0]
        found = hvd.sparse_allreduce_async(tensor, None, hvd.Average)()
        assert found.to_dense()[:, 0].tolist() == [1.0, 2.5, 2.5, 0.0, 0.0]
        if rank == 0:
            tensor = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (5, 2))
        found = hvd.sparse_allreduce_async(tensor, "one.is.empty", hvd.Sum)()
        assert found.to_dense()[:, 0].tolist() == [1.0, 0.0, 5.0, 0.0, 0.0]

    job(2, check)
