"""Every operation of torch.distributed on the back end ``horovod`` beside Gloo: time and processor time, quiet and busy.

    horovodrun -np 2 python benchmarks/torch_distributed_calls.py
    horovodrun -np 2 python benchmarks/torch_distributed_calls.py --busy 4

Both back ends take turns, a burst of calls each, so noise of the machine falls on both. In each turn the ratios are taken;
shown are their medians. Processor time is that of all threads of all ranks. ``--busy`` starts processes that compute meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from machine import describe, in_words

import horovod.torch  # noqa: F401  it registers the back end

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 64 * MIB]

Call = Callable[[Any], Any]
"""Calls an operation on a group."""


def operations(nbytes: int) -> dict[str, Call]:
    """Every operation, with tensors of so many bytes on each rank: of each part, if an operation takes one for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one, whole, other = torch.ones(nbytes // 4), torch.ones(nbytes // 4 * size), torch.empty(nbytes // 4 * size)
    parts, others = list(whole.chunk(size)), list(other.chunk(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    text = "x" * nbytes

    def ping_pong(group: Any) -> None:
        if rank == 0:
            dist.send(one, 1, group=group)
            dist.recv(one, 1, group=group)
        elif rank == 1:
            dist.recv(one, 0, group=group)
            dist.send(one, 0, group=group)

    def around(group: Any) -> None:
        for work in (dist.isend(one, after, group=group), dist.irecv(others[0], before, group=group)):
            work.wait()

    return {
        "all_reduce": lambda group: dist.all_reduce(one, group=group),
        "all_reduce, async": lambda group: dist.all_reduce(one, group=group, async_op=True).wait(),
        "broadcast": lambda group: dist.broadcast(one, 0, group=group),
        "reduce": lambda group: dist.reduce(one, 0, group=group),
        "all_gather": lambda group: dist.all_gather(others, one, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(other, one, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter(one, parts, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(one, whole, group=group),
        "gather": lambda group: dist.gather(one, others if rank == 0 else None, 0, group=group),
        "scatter": lambda group: dist.scatter(one, parts if rank == 0 else None, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all(others, parts, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(other, whole, group=group),
        "send, recv": ping_pong,
        "isend, irecv": around,
        "barrier": lambda group: dist.barrier(group),
        "all_gather_object": lambda group: dist.all_gather_object([None] * size, text, group=group),
        "broadcast_object_list": lambda group: dist.broadcast_object_list([text], 0, group=group),
    }


class Burst(NamedTuple):
    """What one call took in a burst of calls: seconds on the slowest rank, and seconds of processor time on all ranks."""

    seconds: float
    cpu: float


def burst(call: Call, group: Any, calls: int, control: Any) -> Burst:
    dist.barrier(control)
    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call(group)
    took = torch.tensor([time.perf_counter() - started, time.process_time() - cpu], dtype=torch.float64)
    slowest, total = took[:1].clone(), took[1:].clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
    dist.all_reduce(total, group=control)
    return Burst(float(slowest) / calls, float(total) / calls)


def beside(call: Call, own: Any, gloo: Any, rounds: int, seconds: float) -> dict[str, float]:
    """Both groups in turn: the medians of the times and of the ratios, Gloo's over Horovod's."""
    once = max(burst(call, group, 3, gloo).seconds for group in (own, gloo))
    agreed = torch.tensor([once], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=gloo)
    calls = max(1, min(500, int(seconds / float(agreed))))
    pairs = []
    for turn in range(rounds + 1):
        order = (own, gloo) if turn % 2 else (gloo, own)
        found = {group: burst(call, group, calls, gloo) for group in order}
        pairs.append((found[own], found[gloo]))
    counted = pairs[1:]  # the first turn warms up
    return {
        "horovod": statistics.median(mine.seconds for mine, _ in counted),
        "gloo": statistics.median(other.seconds for _, other in counted),
        "ratio": statistics.median(other.seconds / mine.seconds for mine, other in counted),
        "horovod_cpu": statistics.median(mine.cpu for mine, _ in counted),
        "gloo_cpu": statistics.median(other.cpu for _, other in counted),
        "cpu_ratio": statistics.median(other.cpu / max(mine.cpu, 1e-9) for mine, other in counted),
    }


def _compute() -> None:
    while True:
        pass


@contextmanager
def others(count: int) -> Iterator[None]:
    """Processes that compute until the end."""
    processes = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a burst of calls")
    parser.add_argument("--smallest", type=int, default=1, help="smallest tensor, in KiB")
    parser.add_argument("--largest", type=int, default=64 * 1024, help="largest tensor, in KiB")
    parser.add_argument("--only", default="", help="operations, separated by semicolons; by default all")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute meanwhile")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("horovod")
    own, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    first = dist.get_rank() == 0
    machine = describe() if first else {}
    dist.barrier(gloo)  # the others sleep while rank 0 looks how busy the machine is
    wanted = [each.strip() for each in options.only.split(";") if each.strip()]
    rows = []
    if first:
        print(
            in_words(machine),
            f"{dist.get_world_size()} ranks, PyTorch {torch.__version__}, {options.busy} busy processes",
            sep="\n",
        )
        print(f"{'':34}{'ms':>10}{'gloo ms':>10}{'ratio':>8}{'cpu ms':>10}{'gloo cpu':>10}{'ratio':>8}")
    with others(options.busy if first else 0):
        for nbytes in [each for each in SIZES if options.smallest * KIB <= each <= options.largest * KIB]:
            for name, call in operations(nbytes).items():
                if (wanted and name not in wanted) or (name == "barrier" and nbytes > SIZES[0]):
                    continue
                found = beside(call, own, gloo, options.rounds, options.seconds)
                rows.append({"operation": name, "bytes": nbytes, **found})
                if first:
                    times = "".join(f"{found[key] * 1e3:10.3f}" for key in ("horovod", "gloo"))
                    cpu = "".join(f"{found[key] * 1e3:10.3f}" for key in ("horovod_cpu", "gloo_cpu"))
                    label = f"{name} {nbytes // KIB} KiB"
                    print(f"{label:34}{times}{found['ratio']:8.2f}{cpu}{found['cpu_ratio']:8.2f}", flush=True)
    if first and options.json is not None:
        record = {"machine": machine, "ranks": dist.get_world_size(), "busy": options.busy, "calls": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
