"""DDP and collectives of torch.distributed on the back end ``horovod`` beside the same on Gloo, in the same processes.

    horovodrun -np 2 python benchmarks/torch_distributed.py

Both back ends take turns, step by step or call by call, so noise of the machine falls on both. Shown are the medians, and the
ratio of the medians, Gloo's over Horovod's. A group costs nothing while the other one works. Other arrangements of the same
training take turns with them: DDP with ``gradient_as_bucket_view=True`` on both back ends, ``hvd.DistributedOptimizer``, and
DDP with a hook that communicates nothing, which is the shortest step that DDP's buckets permit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from machine import describe, in_words
from workloads_torch import WORKLOADS

import horovod.torch as hvd

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def timed(call: Callable[[], Any], group: Any) -> float:
    """Seconds that a call takes on the slowest rank; all begin together."""
    dist.barrier(group)
    started = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


class Contender(NamedTuple):
    """A call that takes turns with others.

    Attributes:
        group: whose ranks begin it together.
    """

    call: Callable[[], Any]
    group: Any


class Found(NamedTuple):
    """The seconds that one contender took.

    Attributes:
        seconds: the median of all rounds.
        fastest: the least, which other work on the machine disturbs least.
    """

    seconds: float
    fastest: float


def beside(contenders: Sequence[Contender], rounds: int) -> list[Found]:
    """Have them take turns, in the opposite order in every other round."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 2):
        turn = list(zip(contenders, times, strict=True))
        for contender, taken in turn if number % 2 else reversed(turn):
            taken.append(timed(contender.call, contender.group))
    counted = [taken[2:] for taken in times]  # the first rounds warm up
    return [Found(statistics.median(taken), min(taken)) for taken in counted]


def collectives(own: Any, gloo: Any, rounds: int, largest: int) -> list[dict[str, Any]]:
    size = dist.get_world_size()
    rows = []
    for nbytes in [each for each in SIZES if each <= largest]:
        tensor, whole = torch.ones(nbytes // 4), torch.ones(nbytes // 4 * size)
        calls: dict[str, Callable[[Any], Any]] = {
            "all_reduce": lambda group, t=tensor: dist.all_reduce(t, group=group),
            "broadcast": lambda group, t=tensor: dist.broadcast(t, 0, group=group),
            "all_gather": lambda group, t=tensor, w=whole: dist.all_gather_into_tensor(w, t, group=group),
            "reduce_scatter": lambda group, t=tensor, w=whole: dist.reduce_scatter_tensor(t, w, group=group),
            "all_to_all": lambda group, t=tensor: dist.all_to_all_single(torch.empty_like(t), t, group=group),
        }
        for name, call in calls.items():
            mine, other = beside([Contender(partial(call, group), group) for group in (own, gloo)], rounds)
            rows.append({"operation": name, "bytes": nbytes, **row(mine, other)})
    return rows


ARRANGEMENTS = {
    "horovod": "DDP on horovod",
    "gloo": "DDP on gloo",
    "horovod_views": "DDP on horovod, gradient_as_bucket_view",
    "gloo_views": "DDP on gloo, gradient_as_bucket_view",
    "optimizer": "hvd.DistributedOptimizer",
    "silent": "DDP without communication",
}


def training(own: Any, gloo: Any, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        found = beside([trainer(name, arrangement, own, gloo) for arrangement in ARRANGEMENTS], rounds)
        mine, other = found[:2]
        taken = {arrangement: each.seconds for arrangement, each in zip(ARRANGEMENTS, found, strict=True)}
        least = {arrangement: each.fastest for arrangement, each in zip(ARRANGEMENTS, found, strict=True)}
        rows.append({"model": name, **row(mine, other), **taken, "fastest_seconds": least})
    return rows


def trainer(name: str, arrangement: str, own: Any, gloo: Any) -> Contender:
    """One step of training a new model in one of the arrangements."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    model = workload.model
    group = gloo if arrangement.startswith("gloo") else own
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if arrangement == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    else:
        views = arrangement.endswith("views")
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
        if arrangement == "silent":
            model.register_comm_hook(None, nothing)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()

    return Contender(step, group)


def nothing(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are texts
    """A hook of DDP that communicates nothing. All else that DDP does for communication it still does."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def row(mine: Found, other: Found) -> dict[str, float]:
    """The times of a call on both back ends, and Gloo's over Horovod's: of the medians, and of the fastest."""
    return {
        "horovod": mine.seconds,
        "gloo": other.seconds,
        "ratio": other.seconds / mine.seconds,
        "fastest": other.fastest / mine.fastest,
    }


def show(title: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    print(f"{title:24}{'horovod ms':>12}{'gloo ms':>12}{'ratio':>8}{'of fastest':>12}")
    for name, each in rows:
        times = f"{each['horovod'] * 1e3:12.3f}{each['gloo'] * 1e3:12.3f}"
        print(f"{name:24}{times}{each['ratio']:8.2f}{each['fastest']:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=64, help="largest message, in MiB")
    parser.add_argument("--models", default=",".join(WORKLOADS), help="separated by commas; empty: none")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("horovod")
    hvd.init()
    own, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    machine = describe() if dist.get_rank() == 0 else {}
    dist.barrier(gloo)  # the others sleep while rank 0 looks how busy the machine is
    rows = training(own, gloo, options.rounds, [name for name in options.models.split(",") if name])
    moved = collectives(own, gloo, options.rounds, options.largest * MIB)
    if dist.get_rank() == 0:
        print(in_words(machine), f"{dist.get_world_size()} ranks, PyTorch {torch.__version__}", sep="\n")
        show("a step of DDP", [(each["model"], each) for each in rows])
        for each in rows:
            for arrangement, words in ARRANGEMENTS.items():
                least = each["fastest_seconds"][arrangement]
                print(f"{each['model']:24}{each[arrangement] * 1e3:12.3f}{least * 1e3:12.3f} (fastest)  {words}")
        show("collective", [(f"{each['operation']} {each['bytes'] // KIB} KiB", each) for each in moved])
        if options.json is not None:
            record = {"machine": machine, "ranks": dist.get_world_size(), "training": rows, "collectives": moved}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
