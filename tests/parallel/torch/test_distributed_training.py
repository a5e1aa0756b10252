"""What stands on torch.distributed trains on the back end: DDP and its hooks, FSDP2, checkpoints, ZeRO, DTensor, pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from process_groups import run_in_group
from ranks import RankPool
from torch_versions import needs_torch


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))


def train(trained: Any, steps: int = 3, size: int = 4, optimizer: Any = None) -> list[float]:
    """Train on data of this rank's own; the parameters."""
    import torch.distributed as dist

    optimizer = optimizer or torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        trained(torch.randn(size, 16, generator=data)).square().mean().backward()
        optimizer.step()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in trained.parameters()]
    return [x for p in whole for x in p.detach().flatten().tolist()]


def test_ddp_gives_the_parameters_that_it_gives_on_gloo(ranks: Callable[..., RankPool]) -> None:
    """Equal on all ranks to the bit, and to Gloo's within rounding, after 50 steps in all its ways."""

    def check() -> list[list[float]]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        ways: list[dict[str, Any]] = [
            {},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
            {"bucket_cap_mb": 0.001},
        ]
        found = [train(DistributedDataParallel(model(), **options), 50) for options in ways]
        gloo = dist.new_group(backend="gloo")
        found.append(train(DistributedDataParallel(model(), process_group=gloo), 50))
        return found

    first, second = run_in_group(ranks(2, framework="torch"), check)
    assert first == second
    *own, gloo = first
    for each in own:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(gloo))


@needs_torch("2.6", "bfloat16 on Gloo, perhaps before 2.6")
def test_ways_of_ddp(ranks: Callable[..., RankPool]) -> None:
    """Hooks, join, no_sync, sparse gradients."""

    def check() -> list[list[float]]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.distributed.algorithms.join import Join
        from torch.nn.parallel import DistributedDataParallel

        rank = dist.get_rank()

        def hooked(hook: Any, state: Any = None, **options: Any) -> list[float]:
            made = DistributedDataParallel(model(), **options)
            made.register_comm_hook(state, hook)
            return train(made, 6)

        def bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  # PyTorch looks at annotations
            """Under a name of its own: PyTorch refuses the hook itself on CPUs."""
            return default_hooks.bf16_compress_hook(group, bucket)

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        found = [
            hooked(default_hooks.allreduce_hook),
            hooked(default_hooks.fp16_compress_hook),
            hooked(bf16_hook),
            hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
            # Several buckets: their callbacks call collectives in an order of their own on each rank.
            hooked(powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=0.001),
        ]
        gloo = dist.new_group(backend="gloo")
        for hook, own in ((default_hooks.allreduce_hook, found[0]), (bf16_hook, found[2])):
            torch.testing.assert_close(
                torch.tensor(own), torch.tensor(hooked(hook, gloo, process_group=gloo)), rtol=2e-2, atol=1e-3
            )
        single = []
        for group in (None, gloo):  # one bucket: with several, Gloo's two threads wait for themselves
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            single.append(torch.tensor(hooked(powerSGD_hook.powerSGD_hook, state, process_group=group)))
        torch.testing.assert_close(*single)
        lasting = []
        for group in (None, gloo):
            joined = DistributedDataParallel(model(), process_group=group)
            with Join([joined]):
                train(joined, 2 + 3 * rank)
            lasting.append([x for p in joined.parameters() for x in p.detach().flatten().tolist()])
        torch.testing.assert_close(torch.tensor(lasting[0]), torch.tensor(lasting[1]))
        found.append(lasting[0])
        apart = DistributedDataParallel(model())
        with apart.no_sync():
            apart(torch.ones(2, 16) * rank).sum().backward()
        apart(torch.ones(2, 16)).sum().backward()
        found.append([x for p in apart.parameters() for x in p.grad.flatten().tolist()])  # type: ignore[union-attr]
        embedding = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
        embedding(torch.tensor([rank, rank + 1])).sum().backward()
        assert embedding.module.weight.grad.to_dense().sum(1).tolist() == [2.0, 4.0, 2.0] + [0.0] * 7
        return found

    first, second = run_in_group(ranks(2, framework="torch"), check)
    assert first == second


@needs_torch("2.7", "FSDP2 on CPUs")
def test_sharded_training_and_checkpoints(ranks: Callable[..., RankPool], tmp_path: Any) -> None:
    """FSDP2 and ZeRO take the steps that one process with all data takes; DCP restores what it has saved."""

    def check(folder: str) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded: Any = model()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        train(sharded, optimizer=optimizer)
        plain = DistributedDataParallel(model())
        expected = train(plain)
        full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.testing.assert_close(full, dict(plain.module.state_dict()))
        whole, momenta = get_state_dict(
            sharded, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_rank() == 0:
            torch.testing.assert_close(whole, full)
            assert momenta["state"]["0.weight"]["momentum_buffer"].shape == (32, 16)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)  # the others have none
        set_model_state_dict(sharded, whole, options=options)
        set_optimizer_state_dict(sharded, optimizer, momenta, options=options)
        torch.testing.assert_close(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)), full)
        state = {"model": get_model_state_dict(sharded)}
        dcp.save(state, checkpoint_id=folder)
        kept = {name: value.full_tensor().clone() for name, value in state["model"].items()}
        for value in state["model"].values():
            value.to_local().zero_()
        dcp.load(state, checkpoint_id=folder)
        for name, value in state["model"].items():
            assert torch.equal(value.full_tensor(), kept[name]), name

        replica = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            replica(torch.randn(4, 16, generator=data)).square().mean().backward()
            optimizer.step()
        optimizer.consolidate_state_dict()
        torch.testing.assert_close(torch.cat([p.flatten() for p in replica.parameters()]), torch.tensor(expected))

    run_in_group(ranks(2, framework="torch"), check, str(tmp_path / "checkpoint"))


@needs_torch("2.6", "public DTensors and pipelines, perhaps before 2.6")
def test_distributed_tensors_and_pipelines(ranks: Callable[..., RankPool]) -> None:
    def check() -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        rank, size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(24.0).view(6, 4)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        product = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
        assert torch.equal(product.full_tensor(), whole @ whole.t())

        split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(split(torch.ones(4, 16)), model()(torch.ones(4, 16)))
        split(torch.ones(4, 16)).sum().backward()

        layers = list(model())
        stage = PipelineStage(
            torch.nn.Sequential(*(layers[:1] if rank == 0 else layers[1:])), rank, size, torch.device("cpu")
        )
        losses: list[Any] = []
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
        if rank == 0:
            schedule.step(torch.ones(4, 16))
        else:
            schedule.step(target=torch.zeros(4, 16), losses=losses)
            expected = torch.nn.functional.mse_loss(model()(torch.ones(2, 16)), torch.zeros(2, 16))
            torch.testing.assert_close(losses[0].detach(), expected.detach())

    run_in_group(ranks(2, framework="torch"), check)


@needs_torch("2.6", "functional collectives without an assertion about groups that have ended, perhaps before 2.6")
def test_differentiable_and_functional_collectives(ranks: Callable[..., RankPool]) -> None:
    def check() -> None:
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional
        import torch.distributed.nn as differentiable

        rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

        def gradient(operation: Callable[[Any], Any]) -> list[float]:
            tensor = torch.ones(2, requires_grad=True)
            result = operation(tensor)
            sum(each.sum() for each in (result if isinstance(result, list | tuple) else [result])).backward()  # type: ignore[union-attr]
            assert tensor.grad is not None
            return tensor.grad.tolist()

        assert gradient(differentiable.all_reduce) == [size, size]
        assert gradient(differentiable.all_gather) == [size, size]
        assert gradient(lambda t: differentiable.broadcast(t, 0)) == ([size, size] if rank == 0 else [0, 0])
        assert gradient(lambda t: differentiable.reduce(t, 0)) == [1, 1]
        assert gradient(lambda t: differentiable.gather(t, 0)) == [1, 1]
        assert gradient(lambda t: differentiable.all_to_all_single(torch.zeros(2), t)) == [1, 1]

        def program(x: torch.Tensor) -> torch.Tensor:
            total = functional.all_reduce(x, "sum", group)
            gathered = functional.all_gather_tensor(total, 0, group)
            part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
            turned = functional.all_to_all_single(part, None, None, group)
            return functional.broadcast(turned, 0, group) + 1

        expected = program(torch.ones(2) * (rank + 1))
        assert expected.tolist() == [1.0 + size * sum(range(1, size + 1))] * 2
        compiled: Any = torch.compile(program, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(2) * (rank + 1)), expected)

    run_in_group(ranks(2, framework="torch"), check)


def test_local_sgd(ranks: Callable[..., RankPool]) -> None:
    def check() -> list[float]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
        from torch.nn.parallel import DistributedDataParallel

        alone, _ = dist.new_subgroups(group_size=1)
        trained = DistributedDataParallel(model())
        trained.register_comm_hook(PostLocalSGDState(None, alone, 2), post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(trained.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
        )
        data = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            optimizer.zero_grad()
            trained(torch.randn(4, 16, generator=data)).square().mean().backward()
            optimizer.step()
        return [x for p in trained.parameters() for x in p.detach().flatten().tolist()]

    first, second = run_in_group(ranks(2, framework="torch"), check)
    assert first == pytest.approx(second)


@needs_torch("2.4", "send_object_list()")
def test_objects(ranks: Callable[..., RankPool]) -> None:
    def check() -> None:
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, {"rank": rank, "data": "x" * 1000 * rank})
        assert [each["rank"] for each in everyones] == list(range(size))
        gathered: Any = [None] * size if rank == 1 else None
        dist.gather_object((rank, "g"), gathered, 1)
        assert rank != 1 or gathered == [(of, "g") for of in range(size)]
        told = [f"of {rank}", rank]
        dist.broadcast_object_list(told, 1)
        assert told == ["of 1", 1]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {of}" for of in range(size)] if rank == 0 else None, 0)
        assert mine == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list([1, "two"], 1)
        elif rank == 1:
            received: list[Any] = [None, None]
            dist.recv_object_list(received, 0)
            assert received == [1, "two"]

    run_in_group(ranks(2, framework="torch"), check)
