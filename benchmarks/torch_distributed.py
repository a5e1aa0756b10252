"""DDP and collectives of torch.distributed on the back end ``horovod`` beside the same on Gloo, in the same processes.

    horovodrun -np 2 python benchmarks/torch_distributed.py

Both back ends take turns, step by step or call by call, so noise of the machine falls on both. For each pair of neighbours the
ratio is taken, Gloo's time over Horovod's; shown is the median of the ratios. A group costs nothing while the other one works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe, in_words
from workloads_torch import WORKLOADS

import horovod.torch  # noqa: F401  it registers the back end

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


def beside(pairs: list[tuple[Callable[[], Any], Any]], rounds: int) -> tuple[float, float, float, float]:
    """Of two calls that take turns: the medians of their seconds; the median of the ratios of neighbours, the second over the
    first; and the ratio of the fastest of each, which other work on the machine disturbs least."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + 2):
        turn = pairs if number % 2 else pairs[::-1]
        found = [timed(call, group) for call, group in turn]
        times.append((found[0], found[1]) if number % 2 else (found[1], found[0]))
    times = times[2:]  # the first rounds warm up
    return (
        statistics.median(one for one, _ in times),
        statistics.median(two for _, two in times),
        statistics.median(two / one for one, two in times),
        min(two for _, two in times) / min(one for one, _ in times),
    )


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
            pairs = [(lambda call=call, group=group: call(group), group) for group in (own, gloo)]
            first, second, ratio, fastest = beside(pairs, rounds)
            rows.append(
                {
                    "operation": name,
                    "bytes": nbytes,
                    "horovod": first,
                    "gloo": second,
                    "ratio": ratio,
                    "fastest": fastest,
                }
            )
    return rows


def training(own: Any, gloo: Any, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        pairs = []
        for group in (own, gloo):
            torch.manual_seed(0)
            workload = WORKLOADS[name]()
            trained = torch.nn.parallel.DistributedDataParallel(workload.model, process_group=group)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

            def step(workload: Any = workload, trained: Any = trained, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                workload.loss(trained).backward()
                optimizer.step()

            pairs.append((step, group))
        first, second, ratio, fastest = beside(pairs, rounds)
        rows.append({"model": name, "horovod": first, "gloo": second, "ratio": ratio, "fastest": fastest})
    return rows


def show(title: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    print(f"{title:24}{'horovod ms':>12}{'gloo ms':>12}{'ratio':>8}{'of fastest':>12}")
    for name, row in rows:
        times = f"{row['horovod'] * 1e3:12.3f}{row['gloo'] * 1e3:12.3f}"
        print(f"{name:24}{times}{row['ratio']:8.2f}{row['fastest']:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=64, help="largest message, in MiB")
    parser.add_argument("--models", default=",".join(WORKLOADS), help="separated by commas; empty: none")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("horovod")
    own, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    machine = describe() if dist.get_rank() == 0 else {}
    rows = training(own, gloo, options.rounds, [name for name in options.models.split(",") if name])
    moved = collectives(own, gloo, options.rounds, options.largest * MIB)
    if dist.get_rank() == 0:
        print(in_words(machine), f"{dist.get_world_size()} ranks, PyTorch {torch.__version__}", sep="\n")
        show("a step of DDP", [(row["model"], row) for row in rows])
        show("collective", [(f"{row['operation']} {row['bytes'] // KIB} KiB", row) for row in moved])
        if options.json is not None:
            record = {"machine": machine, "ranks": dist.get_world_size(), "training": rows, "collectives": moved}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
