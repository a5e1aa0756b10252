"""Programs for PyTorch's compiler, each for a group of ``torch.distributed``, and the comparison of two groups."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def model(group: Any, mode: Any) -> list[float]:
    """The parameters after three steps of a compiled DDP model."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    with torch._dynamo.config.patch(optimize_ddp=mode):  # type: ignore[attr-defined]
        trained: Any = torch.compile(DistributedDataParallel(layers, process_group=group), backend="aot_eager")
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            trained(torch.full((4, 8), rank + step + 1.0)).square().mean().backward()
            optimizer.step()
    return [x for p in trained.parameters() for x in p.detach().flatten().tolist()]


def messages(group: Any, x: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    y = torch.zeros_like(x)
    works = [dist.isend(x * 2, (rank + 1) % size, group=group), dist.irecv(y, (rank - 1) % size, group=group)]
    for work in works:
        work.wait()
    if rank == 0:
        dist.send(y + 1, 1, group=group)
        dist.recv(y, 1, group=group)
    else:
        z = torch.zeros_like(x)
        dist.recv(z, 0, group=group)
        dist.send(z + y, 0, group=group)
    return y + 1


def mixed(group: Any, x: Any) -> Any:
    size = dist.get_world_size()
    a, b, gathered, single = x + 1, x * 2, [torch.zeros_like(x) for _ in range(size)], torch.zeros(size * 3)
    first = dist.all_reduce(a, async_op=True, group=group)
    second = dist.broadcast(b, 0, async_op=True, group=group)
    first.wait()
    c = a.sum()
    second.wait()
    dist.all_gather(gathered, x, async_op=True, group=group).wait()
    dist.all_reduce(c, group=group)
    dist.all_gather_into_tensor(single, x, group=group)
    dist.barrier(group)
    return a + b + c + gathered[1] + single.sum()


def futures(group: Any, x: Any) -> Any:
    a = x + 1
    future = dist.all_reduce(a, async_op=True, group=group).get_future()
    return future.wait()[0] * x


PROGRAMS = {"messages": messages, "mixed": mixed, "futures": futures}


def compare(program: str) -> None:
    """Runs on a rank: the program on both groups, compiled and not."""
    gloo, rank = dist.new_group(backend="gloo"), dist.get_rank()
    if program.startswith("DDP"):
        mode: Any = program.split()[1]
        on_own, on_gloo = [model(group, {"False": False}.get(mode, mode)) for group in (dist.group.WORLD, gloo)]
        torch.testing.assert_close(torch.tensor(on_own), torch.tensor(on_gloo))
        return
    function = PROGRAMS[program]
    for backend in ("eager", "aot_eager"):
        for group in (dist.group.WORLD, gloo):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, group=group: function(group, x), backend=backend)
            for _ in range(2):
                x = torch.ones(3) * (rank + 1)
                assert compiled(x.clone()).tolist() == function(gloo, x.clone()).tolist(), (backend, group)
