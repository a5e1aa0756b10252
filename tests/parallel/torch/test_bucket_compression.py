"""Compressors with a memory in ``DistributedOptimizer``: they learn what is learned without, and go with everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import digits
import horovod.torch as hvd


def everybody_has(model: nn.Module) -> bool:
    """Whether all ranks have the same bits."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everybodys = hvd.allgather(flat.reshape(1, -1))
    return bool((everybodys == everybodys[0]).all())


@pytest.mark.parametrize("size", [2, 3])
def test_digits_are_learned_as_without_compression(job: Any, size: int) -> None:
    def learn() -> dict[str, digits.Outcome]:
        kinds = {
            "none": hvd.Compression.none,
            "powersgd": hvd.Compression.powersgd(rank=2),
            "topk": hvd.Compression.topk(ratio=0.05),
        }
        return {
            name: digits.train(
                lambda model, kind=kind: hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                    model.named_parameters(),
                    compression=kind,
                )
            )
            for name, kind in kinds.items()
        }

    outcomes = job(size, learn)
    found = outcomes[0]
    assert all(other == found for other in outcomes), "the same bits on every rank"
    assert found["none"].accuracy > 0.9
    for name in ("powersgd", "topk"):
        assert found[name].digest != found["none"].digest, "it was not compressed"
        assert found[name].accuracy > found["none"].accuracy - 0.02, name
        assert found[name].loss < 2 * found["none"].loss, name


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def gradient_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, passes: int = 1) -> None:
    optimizer.zero_grad()
    for turn in range(passes):
        x = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(1000 * turn + 10 * step + hvd.rank()))
        model(x).square().mean().backward()
    optimizer.step()


def test_compressors_without_loss_give_the_plain_average(job: Any) -> None:
    """A rank that loses nothing, all of the elements, and a compressor of one's own, in many buckets and in groups."""

    def check() -> None:
        class Plain(hvd.BucketCompressor):
            def reduce(self, gradients: Mapping[str, torch.Tensor], memory: Any, collectives: Any) -> Any:
                for name in gradients:
                    memory[name]["steps"] = memory[name].get("steps", 0) + 1
                total = torch.zeros(1) + memory[name]["steps"]
                (total,) = yield collectives.allreduce([total], "steps")
                assert total.item() == memory[name]["steps"] * (1 if collectives.average else collectives.size)
                yield collectives.allreduce(list(gradients.values()), "plain")

        for arguments in ({}, {"op": hvd.Sum}, {"groups": 2}, {"backward_passes_per_step": 2}):
            results = []
            for compression in (
                hvd.Compression.none,
                Plain(),
                hvd.Compression.powersgd(100),
                hvd.Compression.topk(1.0),
            ):
                model = network()
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                    model.named_parameters(),
                    compression=compression,
                    **arguments,
                )
                for step in range(4):
                    gradient_step(model, optimizer, step, arguments.get("backward_passes_per_step", 1))
                assert everybody_has(model)
                results.append([p.detach() for p in model.parameters()])
            for other in results[1:]:
                torch.testing.assert_close(other, results[0])

    job(3, check, env={"HOROVOD_BUCKET_BYTES": "600"})


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_compressors_work_with_sparse_and_unused_parameters_clipping_and_process_sets(job: Any, kind: str) -> None:
    def check(sets: Any) -> None:
        compression = {"powersgd": hvd.Compression.powersgd(1), "topk": hvd.Compression.topk(0.1)}[kind]
        # channels-last and half-precision parameters, an unused and a sparse one, clipping, two optimizers, a process set
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            table = nn.Embedding(10, 16, sparse=True).to(dtype)
            model = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 8, 1)).to(dtype)
            model.to(memory_format=torch.channels_last)
            unused = nn.Linear(8, 8).to(dtype)
            groups = [*table.parameters(), *model.parameters(), *unused.parameters()]
            one = hvd.DistributedOptimizer(torch.optim.SGD(groups[:2], lr=0.05), compression=compression)
            two = hvd.DistributedOptimizer(torch.optim.SGD(groups[2:], lr=0.05), compression=compression)
            for step in range(3):
                one.zero_grad()
                two.zero_grad()
                chosen = torch.tensor([[hvd.rank(), step], [3, 4 + hvd.rank()]])
                model(table(chosen).permute(0, 2, 1).unsqueeze(-1)).square().mean().backward()
                one.synchronize()
                assert table.weight.grad.is_sparse
                nn.utils.clip_grad_norm_(groups[1:2], 0.1)
                with one.skip_synchronize():
                    one.step()
                two.step()
            for module in (table, model, unused):
                assert everybody_has(module)
        (pair,) = sets
        if pair.included():
            model = network()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05), compression=compression, process_set=pair
            )
            for step in range(2):
                gradient_step(model, optimizer, step)
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            everybodys = hvd.allgather(flat.reshape(1, -1), process_set=pair)
            assert len(everybodys) == 2 and torch.equal(everybodys[0], everybodys[1])

    job(3, check, sets=[[0, 2]])


def test_compressors_of_buckets_are_refused_elsewhere(job: Any) -> None:
    def check() -> None:
        model = network()
        for arguments in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"gradient_predivide_factor": 2.0}):
            with pytest.raises(ValueError, match=r"TopK reduces gradients with op=hvd.Average or hvd.Sum"):
                hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.topk(), **arguments
                )
        with pytest.raises(ValueError, match="pass it to DistributedOptimizer"):
            hvd.allreduce(torch.ones(2), compression=hvd.Compression.powersgd())

    job(2, check)


def test_ranks_with_different_settings_get_an_error_and_can_train_on(job: Any) -> None:
    """Ranks with different settings: every rank learns it, and the optimizer can be used again."""

    def check() -> None:
        model = network()
        compression = hvd.Compression.powersgd(1 + hvd.rank())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression)
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            gradient_step(model, optimizer, 0)
        compression.rank = 1
        for slot in optimizer._horovod.parameters.slots.values():
            slot.memory.clear()
        gradient_step(model, optimizer, 1)

    job(2, check)
