"""SyncBatchNorm against ordinary batch normalisation of the concatenated batch in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd

CHANNELS = 5
SHAPES: dict[str, Sequence[int]] = {"NC": (), "NCL": (7,), "NCHW": (4, 3), "NCDHW": (2, 3, 2)}


def rows(rank: int, uneven: bool) -> int:
    return (3, 6, 0, 4)[rank] if uneven else 4


def batch(rank: int, tail: Sequence[int], dtype: torch.dtype, uneven: bool, step: int = 0) -> torch.Tensor:
    """One rank's inputs; ranks and channels differ in mean and deviation."""
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + len(tail))
    shape = (rows(rank, uneven), CHANNELS, *tail)
    channels = torch.arange(1.0, CHANNELS + 1, dtype=torch.float64).reshape(1, -1, *[1] * len(tail))
    return (channels * (torch.randn(shape, generator=random, dtype=torch.float64) + rank) - 2).to(dtype)


def layers(dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    """The synchronised layer and the ordinary one, alike."""
    torch.manual_seed(1)
    process_set = arguments.pop("process_set", hvd.global_process_set)
    ordinary = nn.BatchNorm1d(CHANNELS, **arguments)
    ordinary._check_input_dim = lambda input: None  # any number of dimensions
    ours = hvd.SyncBatchNorm(CHANNELS, **arguments, process_set=process_set)
    if ordinary.affine:
        nn.init.uniform_(ordinary.weight, 0.5, 2.0)
        nn.init.uniform_(ordinary.bias, -1.0, 1.0)
    ours.load_state_dict(copy.deepcopy(ordinary.state_dict()))
    return ours.to(dtype), ordinary


def compare(
    ours: nn.Module,
    ordinary: nn.Module,
    members: Sequence[int],
    inputs: dict[int, torch.Tensor],
    reference: torch.dtype,
    tolerance: float,
) -> None:
    """One step forward and backward of both; everything must agree."""
    me, process_set = hvd.rank(), ours.process_set
    x = inputs[me].clone().requires_grad_()
    everything = torch.cat([inputs[rank] for rank in members]).to(reference).requires_grad_()
    y, wanted = ours(x), ordinary(everything)
    assert y.dtype == x.dtype and y.shape == x.shape
    gradient = torch.sin(wanted.detach() * 3)
    start = sum(len(inputs[rank]) for rank in members if rank < me)
    mine = slice(start, start + len(x))

    def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            found.to(reference), wanted, rtol=tolerance, atol=4 * tolerance, msg=lambda text: f"{what}: {text}"
        )

    close(y.detach(), wanted.detach()[mine], "output")
    y.backward(gradient[mine].to(y.dtype))
    wanted.backward(gradient)
    assert x.grad is not None and everything.grad is not None and x.grad.dtype == x.dtype
    close(x.grad, everything.grad[mine], "gradient of the input")
    for (name, parameter), other in zip(ours.named_parameters(), ordinary.parameters(), strict=True):
        assert parameter.grad is not None
        total = hvd.allreduce(parameter.grad.to(reference), op=hvd.Sum, process_set=process_set)
        close(total, other.grad, f"gradient of {name}")
    for name, buffer in ours.named_buffers():
        if buffer.dtype.is_floating_point:
            close(buffer, dict(ordinary.named_buffers())[name], name)
        else:
            assert buffer == dict(ordinary.named_buffers())[name]
    ours.zero_grad()
    ordinary.zero_grad()


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_equals_one_process_on_the_concatenated_batch(job: Any, size: int, uneven: bool) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"affine": False, "eps": 0.1},
        {"momentum": None},
        {"momentum": 0.7, "track_running_stats": False},
    ]

    def check() -> None:
        for arguments in settings:
            for tail in SHAPES.values():
                for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-13)):
                    ours, ordinary = layers(dtype, **arguments)
                    ordinary.to(dtype)
                    for step in range(3):
                        inputs = {rank: batch(rank, tail, dtype, uneven, step) for rank in range(size)}
                        compare(ours, ordinary, range(size), inputs, dtype, tolerance)

    job(size, check)


@pytest.mark.parametrize("size", [2, 3])
def test_inputs_of_sixteen_bits_are_normalised_as_in_one_process(job: Any, size: int) -> None:
    def check() -> None:
        for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            for parameters in (dtype, torch.float32):  # a model cast as a whole, and one whose activations alone are
                ours, ordinary = layers(parameters)
                for step in range(2):
                    inputs = {rank: batch(rank, (4, 3), dtype, True, step) for rank in range(size)}
                    compare(ours, ordinary, range(size), inputs, torch.float32, tolerance)

    job(size, check)


def test_a_mean_much_larger_than_the_deviation_does_not_spoil_the_variance(job: Any) -> None:
    """What squares would lose in float32."""

    def check() -> None:
        ours, _ = layers()
        inputs = [batch(rank, (50,), torch.float32, False) * 0.01 + 300 for rank in range(2)]
        everything = torch.cat(inputs).double()
        ours(inputs[hvd.rank()])
        variance = everything.var(dim=(0, 2))
        torch.testing.assert_close(ours.running_var.double(), 0.9 + 0.1 * variance, rtol=1e-6, atol=0)
        ours.momentum = 1.0
        ours(inputs[hvd.rank()])
        torch.testing.assert_close(ours.running_var.double(), variance, rtol=1e-4, atol=0)

    job(2, check)


def test_evaluation_needs_no_other_rank_and_the_layout_is_kept(job: Any) -> None:
    def check() -> None:
        ours, ordinary = layers()
        inputs = [batch(rank, (4, 3), torch.float32, True) for rank in range(2)]
        channels_last = inputs[hvd.rank()].contiguous(memory_format=torch.channels_last)
        found = ours(channels_last)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, ours(inputs[hvd.rank()]))
        ordinary(torch.cat(inputs))
        ordinary(torch.cat(inputs))
        ours.eval()
        ordinary.eval()
        if hvd.rank() == 0:  # no collective: the other rank does not take part
            torch.testing.assert_close(ours(inputs[0]), ordinary(inputs[0]))
        ours, ordinary = layers(track_running_stats=False)
        ours.eval()
        ordinary.eval()
        torch.testing.assert_close(ours(inputs[0][hvd.rank() :: 2]), ordinary(inputs[0])[hvd.rank() :: 2])

    job(2, check)


def test_a_layer_of_a_process_set_normalises_over_its_members_also_of_one(job: Any) -> None:
    def check(sets: Any) -> None:
        pair, alone = sets
        if pair.included():
            ours, ordinary = layers(process_set=pair)
            inputs = {rank: batch(rank, (7,), torch.float32, False) for rank in pair.ranks}
            compare(ours, ordinary, pair.ranks, inputs, torch.float32, 3e-6)
        else:
            ours, ordinary = layers(process_set=alone)
            compare(ours, ordinary, [1], {1: batch(1, (7,), torch.float32, False)}, torch.float32, 3e-6)

    job(3, check, sets=[[0, 2], [1]])


def test_several_layers_train_as_one_process(job: Any) -> None:
    """In a network, with the optimizer: parameters after some steps are those of one process."""

    def check() -> None:
        def network(norm: Any) -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Conv2d(2, 6, 3),
                norm(6),
                nn.ReLU(),
                nn.Conv2d(6, 6, 3, bias=False),
                norm(6),
                nn.Flatten(),
                nn.Linear(24, 3),
            ).double()

        ours, reference = network(hvd.SyncBatchNorm), network(nn.BatchNorm2d)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
        single = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            random = torch.Generator().manual_seed(step)
            x = torch.randn(12, 2, 6, 6, generator=random, dtype=torch.float64)
            labels = torch.randint(0, 3, (12,), generator=random)
            for model, stepper, mine in (
                (ours, optimizer, slice(4 * hvd.rank(), 4 * hvd.rank() + 4)),
                (reference, single, slice(0, 12)),
            ):
                stepper.zero_grad()
                nn.functional.cross_entropy(model(x[mine]), labels[mine]).backward()
                stepper.step()
        for (name, found), wanted in zip(ours.state_dict().items(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )

    job(3, check)


def test_inputs_of_wrong_shapes_and_types_are_refused(job: Any) -> None:
    def check() -> None:
        layer = hvd.SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match="at least 2D"):
            layer(torch.ones(CHANNELS))
        with pytest.raises(ValueError, match="5 channels"):
            layer(torch.ones(2, CHANNELS + 1))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(torch.ones(1 - hvd.rank(), CHANNELS))  # one row on rank 0, none on rank 1
        assert layer.num_batches_tracked == 0 and not layer.running_mean.any()
        assert layer(torch.ones(1, CHANNELS)).shape == (1, CHANNELS)

    job(2, check)


def test_an_input_that_needs_no_gradient_leaves_those_of_the_parameters_right(job: Any) -> None:
    def check() -> None:
        ours, ordinary = layers()
        inputs = [batch(rank, (7,), torch.float32, False) for rank in range(2)]
        ours(inputs[hvd.rank()]).square().sum().backward()
        ordinary(torch.cat(inputs)).square().sum().backward()
        for parameter, other in zip(ours.parameters(), ordinary.parameters(), strict=True):
            total = hvd.allreduce(parameter.grad, op=hvd.Sum)
            torch.testing.assert_close(total, other.grad, rtol=1e-5, atol=1e-4)

    job(2, check)


def test_a_model_is_converted(job: Any) -> None:
    """It computes what one process computes with the whole batch, with the very parameters an optimizer has already."""

    def check(sets: Any) -> None:
        torch.manual_seed(1)
        shared = nn.BatchNorm1d(3)
        norm = nn.BatchNorm1d(4, eps=1e-3, momentum=None)
        model = nn.Sequential(
            nn.Linear(2, 3), shared, nn.Sequential(nn.Linear(3, 4), norm), nn.Linear(4, 3), shared
        ).double()
        reference = copy.deepcopy(model)
        before = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
        assert {name: id(value) for name, value in model.named_parameters()} == {
            name: id(value) for name, value in before.items()
        }
        assert model.state_dict().keys() == reference.state_dict().keys()
        assert model[1] is model[4] and type(model[1]) is hvd.SyncBatchNorm
        assert (model[2][1].eps, model[2][1].momentum) == (1e-3, None)
        assert model[1].training
        others = nn.ModuleList([nn.BatchNorm2d(2, affine=False).eval(), nn.BatchNorm1d(2, track_running_stats=False)])
        fixed, plain = hvd.SyncBatchNorm.convert_sync_batchnorm(others)
        assert type(fixed) is type(plain) is hvd.SyncBatchNorm
        assert not fixed.training and fixed.weight is None and plain.training and plain.running_mean is None
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        single = torch.optim.SGD(reference.parameters(), lr=0.1)
        x = torch.randn(8, 2, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            single.zero_grad()
            model(x[4 * hvd.rank() :][:4]).square().mean().backward()
            reference(x).square().mean().backward()
            optimizer.step()
            single.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-10, atol=1e-10)
        one = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3), sets[0])
        assert type(one) is hvd.SyncBatchNorm and one.process_set is sets[0]
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(one) is one and one.process_set is sets[0]
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3), process_set=sets[0]).process_set is sets[0]
        assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.InstanceNorm2d(3, affine=True))) is nn.InstanceNorm2d

    job(2, check, sets=[[0]])


def test_models_that_cannot_be_converted_are_refused_with_the_reason(job: Any) -> None:
    def check() -> None:
        convert = hvd.SyncBatchNorm.convert_sync_batchnorm
        with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module, not list"):
            convert([nn.BatchNorm1d(2)])
        with pytest.raises(TypeError, match=r"expected a hvd\.ProcessSet"):
            convert(nn.BatchNorm1d(2), object())
        with pytest.raises(ValueError, match="pass one of them"):
            convert(nn.BatchNorm1d(2), hvd.global_process_set, hvd.global_process_set)
        with pytest.raises(ValueError, match=r"LazyBatchNorm1d has no number of channels yet: call the model once"):
            convert(nn.Sequential(nn.LazyBatchNorm1d()))
        with pytest.raises(TypeError, match=r"expected a hvd\.ProcessSet"):
            hvd.SyncBatchNorm(2, process_set=[0, 1])

    job(1, check)
