"""GPUs: allreduce bandwidth beside torch.distributed's NCCL, and training steps beside DistributedDataParallel.

    python benchmarks/gpu.py                          # one rank on each GPU, or two on one
    python benchmarks/gpu.py --np 2 --rounds 9 --json gpu.json

What is measured, and how
    allreduce     in place, float32, of one tensor and of ResNet-50's gradients as 161 tensors (hvd: one group;
                  torch.distributed: one call each, coalesced). *Bus bandwidth* is bytes * 2 (n - 1) / n / seconds.
    steps         of a CNN (ResNet-50's layout) and a transformer, from the forward pass to the end of the optimizer's step:
                  alone (no communication), with ``DistributedOptimizer``, and in ``DistributedDataParallel``.
    All contenders take turns in one run and in the same processes, in another order each round. Times are the GPU's own,
    between two of its events, after a warm-up, and the slowest rank counts; the table has the best round of each, and ratios
    of bests.

Ranks that share a card take turns of milliseconds at each collective, so there fewer and larger ones win: with
``HOROVOD_CYCLE_TIME=10`` gradients are collected for longer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horovod.check_gpu.speed import compare, in_turns
from horovod.comm.nccl.engine import SERVES_SEVERAL, SEVERAL_RANKS
from horovod.comm.nccl.library import code_of, loaded, text_of

SIZES = [1 << power for power in range(12, 31, 3)]
"""Bytes of one tensor."""
WORKER = "HOROVOD_BENCHMARK_GPU_WORKER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=0, help="ranks (default: one for each GPU)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank's step")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    if os.environ.get(WORKER):
        work(options)
        return
    gpus = torch.cuda.device_count()
    ranks = options.np or max(gpus, 2)
    if not gpus:
        sys.exit(
            "PyTorch finds no CUDA or ROCm device; one for each rank is needed, or one for all with NCCL 2.30 or newer."
        )
    shared = {SEVERAL_RANKS: "1"} if ranks > gpus else {}
    if shared:
        wanted, found = code_of(SERVES_SEVERAL), loaded().version()
        if found < wanted:
            sys.exit(f"{ranks} ranks share {gpus} GPUs with NCCL {text_of(wanted)} or newer; this is {text_of(found)}.")
        print(
            f"{ranks} ranks share {gpus} GPUs and take turns: the figures tell of the host's costs, and of no bandwidth."
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        **os.environ,
        WORKER: "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        **shared,
    }
    command = ["horovodrun", "-np", str(ranks), sys.executable, __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=env).returncode)


def work(options: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed as dist

    import horovod.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    dist.init_process_group("nccl", rank=hvd.rank(), world_size=hvd.size())
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": hvd.nccl_built(),
        "ranks": hvd.size(),
    }
    try:
        figures["allreduce"] = bandwidths(options.rounds)
        figures["steps"] = {name: steps(make, options) for name, make in MODELS.items()}
    finally:
        dist.destroy_process_group()
        hvd.shutdown()
    if os.environ.get("HOROVOD_RANK") == "0":
        show(figures)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))


def bandwidths(rounds: int) -> list[dict[str, Any]]:
    cases = [(f"{size} bytes", [torch.zeros(size // 4, device="cuda")], 50 if size < 1 << 24 else 10) for size in SIZES]
    cases.append(("gradients of the CNN", [torch.zeros_like(parameter) for parameter in cnn()[0].parameters()], 10))
    return [compare(label, tensors, rounds, times) for label, tensors, times in cases]


def cnn() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Bottleneck blocks with the sizes of ResNet-50."""

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            after = 4 * width
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
            )  # fmt: skip
            direct = stride == 1 and before == after
            self.around = nn.Identity() if direct else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.body(x) + self.around(x))

    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(blocks):
            layers.append(Block(before, width, stride if index == 0 else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers).cuda(), lambda batch: torch.randn(batch, 3, 224, 224, device="cuda")


def transformer() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Twelve layers of width 768."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12).cuda(), lambda batch: torch.randn(batch, 128, 768, device="cuda")


MODELS = {"CNN": cnn, "transformer": transformer}


def steps(
    make: Callable[[], tuple[nn.Module, Callable[[int], torch.Tensor]]], options: argparse.Namespace
) -> dict[str, Any]:
    import horovod.torch as hvd

    def stepping(kind: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model, data = make()
        x = data(options.batch)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        if kind == "hvd":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        elif kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    found = in_turns(
        {kind: stepping(kind) for kind in ("alone", "hvd", "ddp")}, options.rounds, 10, torch.device("cuda")
    )
    return {"seconds": found, "best": {kind: min(times) for kind, times in found.items()}}


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['ranks']} ranks, {figures['device']}, PyTorch {figures['torch']}, NCCL {figures['nccl']}\n")
    print(f"{'allreduce':>24} {'hvd GB/s':>10} {'torch GB/s':>11} {'ratio':>6}   the higher the better")
    for row in figures["allreduce"]:
        ours, theirs = row["bus"]["hvd"], row["bus"]["torch.distributed"]
        print(f"{row['what']:>24} {ours / 1e9:>10.2f} {theirs / 1e9:>11.2f} {ours / theirs:>6.2f}")
    print(f"\n{'step':>24} {'alone ms':>10} {'hvd ms':>8} {'ddp ms':>8} {'ddp/hvd':>8}   above 1: hvd is quicker")
    for name, row in figures["steps"].items():
        best = row["best"]
        spread = statistics.pstdev(row["seconds"]["hvd"]) * 1e3
        print(
            f"{name:>24} {best['alone'] * 1e3:>10.1f} {best['hvd'] * 1e3:>8.1f} {best['ddp'] * 1e3:>8.1f} "
            f"{best['ddp'] / best['hvd']:>8.2f}   (hvd deviates by {spread:.1f} ms)"
        )


if __name__ == "__main__":
    main()
