"""How long collectives take, Horovod's beside those of torch.distributed, in the same processes and in turns.

Times are the device's own, between two of its events, after a warm-up; on CPUs those of the clock. The slowest rank counts. The
contenders take turns, in another order each round. ``benchmarks/gpu.py`` uses this, too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import horovod.torch as hvd

GRADIENTS = [64, 256, 4096, 36864, 65536] * 29 + [600_000] * 16
"""Elements of 161 tensors, about as many and as large as the gradients of ResNet-50."""


def seconds(run: Callable[[], Any], times: int, device: torch.device) -> float:
    """The seconds of one call, of the slowest rank. Every rank must call this."""
    hvd.barrier()
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        spent = begin.elapsed_time(end) / 1000
    else:
        start = time.perf_counter()
        for _ in range(times):
            run()
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
        spent = time.perf_counter() - start
    own = torch.tensor([spent / times], dtype=torch.float64)
    return float(hvd.allreduce(own, op=hvd.Max, name="seconds"))


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, times: int, device: torch.device
) -> dict[str, list[float]]:
    """Each contender's seconds, by round. All ranks go through them in the same order."""
    order, shuffled = list(contenders), random.Random(1)
    found: dict[str, list[float]] = {name: [] for name in order}
    for run in contenders.values():
        seconds(run, 3, device)  # connects, and fills caches
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            found[name].append(seconds(contenders[name], times, device))
    return found


def compare(
    label: str, tensors: Sequence[torch.Tensor], rounds: int, times: int, alone: bool = False
) -> dict[str, Any]:
    """The seconds and the bus bandwidth (bytes * 2 (n - 1) / n / seconds) of allreduces of these tensors in place.

    Args:
        tensors: Horovod reduces them as one group, torch.distributed with one call each, coalesced on GPUs.
        alone: torch.distributed is not initialised, so Horovod is measured alone.
    """
    dist: Any = torch.distributed

    def ours() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(list(tensors), name=label, op=hvd.Sum))

    def theirs() -> None:
        if len(tensors) == 1 or tensors[0].is_cpu:
            for tensor in tensors:
                dist.all_reduce(tensor)
            return
        with dist._coalescing_manager(async_ops=False):
            for tensor in tensors:
                dist.all_reduce(tensor)

    contenders = {"hvd": ours} if alone else {"hvd": ours, "torch.distributed": theirs}
    found = in_turns(contenders, rounds, times, tensors[0].device)
    length = sum(tensor.nbytes for tensor in tensors)
    factor = 2 * (hvd.size() - 1) / hvd.size() or 1.0  # of one rank, what goes through memory
    return {
        "what": label,
        "bytes": length,
        "seconds": found,
        "bus": {name: length * factor / min(times) for name, times in found.items()},
    }
