"""The sections of ``horovodrun --check-gpu``, each a function that a rank calls. It prints what it finds, and raises if that is
wrong.

Sections run on CUDA devices, on CPUs where there are none, and in tests on a device that stands in for one: the functions of
``torch.cuda`` that they use are taken from the device's module.
"""

from __future__ import annotations

import copy
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import horovod.torch as hvd
from horovod._base import config
from horovod.check_gpu import speed
from horovod.comm.nccl import library
from horovod.core.lifecycle import context
from horovod.runner.gpu_report import PASSED


def run(name: str, device: torch.device | None = None) -> None:
    """One rank of a section. Rank 0 prints a last line that says that it has passed."""
    hvd.init()
    if device is None:
        cards = torch.cuda.device_count()
        device = torch.device("cuda", hvd.local_rank() % cards) if cards else torch.device("cpu")
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    section: Callable[[torch.device], None] = SECTIONS[name]
    section(device)
    say(f"{PASSED} {name}")
    hvd.shutdown()


def say(*words: Any) -> None:
    """Print on rank 0."""
    if os.environ.get(config.RANK, "0") == "0":
        print(*words, flush=True)


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def microseconds(run: Callable[[], Any], device: torch.device, times: int = 30) -> str:
    """What one call takes the host, as text."""
    for _ in range(3):
        run()
    wait_for(device)
    hvd.barrier()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append((time.perf_counter() - begin) * 1e6)
    wait_for(device)
    return f"{statistics.median(found):.0f} us (90th percentile {sorted(found)[int(0.9 * times)]:.0f})"


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"rank {hvd.rank()}: {what}")


def engine(device: torch.device) -> None:
    """Which engine carries out a first sum, and that it is right."""
    total = hvd.allreduce(torch.full((4,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
    wanted = hvd.size() * (hvd.size() + 1) / 2
    require(total.tolist() == [wanted] * 4, f"the sum is {total.tolist()}, and should be {wanted}")
    used = context.current().device_engine
    version = library.text_of(library.loaded().version()) if used else "-"
    way = f"by {used} (NCCL {version} at {library.find()})" if used else "through host memory"
    say(f"{hvd.size()} ranks; tensors on {device.type} travel {way}")


def results(device: torch.device) -> None:
    """Right numbers, and the same bits on all ranks."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for factor in (1.0, 1 / 3, 1e-8 if dtype != torch.float16 else 1e-3, 1e3):
            x = (torch.arange(100_003) % 13 + rank).to(dtype).to(device)
            found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor, name=f"{dtype} {factor}")
            wanted = (torch.arange(100_003) % 13 * size + size * (size - 1) // 2) * factor
            right = torch.allclose(found.cpu().double(), wanted.double(), rtol=2e-2)
            require(right, f"the sum of {dtype} with the factor {factor:g} is wrong")
            every = hvd.allgather(found.cpu().reshape(1, -1))
            require(all(torch.equal(each, every[0]) for each in every), f"the ranks' results differ in {dtype}")
    say("sums with factors are right in four types, with the same bits on all ranks")


def operations(device: torch.device) -> None:
    """Every operation, process sets that overlap, and a rank that has joined."""
    size, rank = hvd.size(), hvd.rank()
    rows = hvd.allgather(torch.full((rank + 1, 2), float(rank), device=device))
    require(rows.cpu()[:, 0].tolist() == [float(each) for each in range(size) for _ in range(each + 1)], "allgather")
    root = hvd.broadcast(torch.full((5,), float(rank), device=device), root_rank=size - 1)
    require(root.tolist() == [size - 1.0] * 5, "broadcast")
    sent = hvd.alltoall(torch.full((size,), float(rank), device=device), splits=torch.ones(size, dtype=torch.int32))
    moved = sent[0] if isinstance(sent, tuple) else sent
    require(moved.tolist() == [float(each) for each in range(size)], "alltoall")
    part = hvd.reducescatter(torch.ones(2 * size + 1, device=device), op=hvd.Sum)
    require(part.tolist() == [float(size)] * (3 if rank == 0 else 2), "reducescatter")
    pairs = [sorted([each, (each + 1) % size]) for each in range(size)]
    sets = [hvd.add_process_set(ranks) for ranks in [[0], *(pairs if size > 2 else [[1]])]]
    for turn in range(3):
        for each in sets:
            if each.included():
                x = hvd.allreduce(torch.ones(1000, device=device), op=hvd.Sum, process_set=each, name=f"set {turn}")
                require(x.cpu().tolist() == [float(len(each.ranks or ()))] * 1000, f"the sum of {each}")
    if rank:
        x = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="after the first rank has joined")
        require(x.tolist() == [size - 1.0] * 3, "the sum without a rank that has joined")
    hvd.join()
    say(f"all operations, {len(sets)} process sets and join are right")


def latency(device: torch.device) -> None:
    for length in (1, 1 << 18, 1 << 22):
        x = torch.ones(length, device=device)

        def whole(x: torch.Tensor = x) -> None:
            hvd.allreduce_(x, name=f"whole {x.numel()}")
            wait_for(device)

        say(f"{length * 4} bytes, to the end: {microseconds(whole, device)}")
    gradients = [torch.ones(n, device=device) for n in speed.GRADIENTS]

    def group() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="group"))

    say(f"161 tensors in a group, until the host goes on: {microseconds(group, device, 15)}")
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    say(f"the same beside a computing Python thread: {microseconds(group, device, 15)}")
    stop.set()
    thread.join()


def beside_torch(device: torch.device) -> None:
    """Allreduces beside torch.distributed's, which shares the devices."""
    import torch.distributed as dist

    alone = ""
    rounds, sizes = (1, (12, 20)) if config.CHECK_GPU_QUICK in os.environ else (3, (12, 18, 24, 28))
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=hvd.rank(), world_size=hvd.size())
        x = torch.ones(1, device=device if device.type == "cuda" else "cpu")
        dist.all_reduce(x)
        wait_for(device)
    except (RuntimeError, ValueError) as error:
        alone = str(error).strip().splitlines()[-1]
    failed = hvd.allreduce(torch.tensor([float(bool(alone))]), op=hvd.Max, name="failed").item() > 0
    if failed:
        say(f"torch.distributed cannot run here, so Horovod was measured alone: {alone}")
    elif device.type not in ("cuda", "cpu"):
        failed = True
    say(f"{'allreduce':>24} {'hvd us':>10} {'torch us':>10} {'torch/hvd':>10} {'hvd GB/s':>9}")
    cases = [(f"{1 << size} bytes", [torch.zeros((1 << size) // 4, device=device)]) for size in sizes]
    cases.append(("161 gradients", [torch.zeros(n, device=device) for n in speed.GRADIENTS]))
    for label, tensors in cases:
        row = speed.compare(label, tensors, rounds, 20 if sum(each.nbytes for each in tensors) < 1 << 22 else 5, failed)
        best = {name: min(times) for name, times in row["seconds"].items()}
        theirs = best.get("torch.distributed", float("nan"))
        ours, bus = best["hvd"], row["bus"]["hvd"] / 1e9
        say(f"{label:>24} {ours * 1e6:>10.0f} {theirs * 1e6:>10.0f} {theirs / ours:>10.2f} {bus:>9.2f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def memory(device: torch.device) -> None:
    """With ``set_to_none`` the peak rises by less than half of the gradients."""
    peaks, gradients = {}, 0
    for kind in ("alone", "hvd"):
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-5)
        if kind == "hvd":
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = torch.randn(2048, 2048, device=device)
        for step in range(8):
            if step == 4:
                wait_for(device)
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        wait_for(device)
        peaks[kind] = torch.cuda.max_memory_allocated() >> 20
        gradients = sum(p.nbytes for p in model.parameters()) >> 20
        del model, optimizer
    say(f"peak in MiB: {peaks['alone']} alone, {peaks['hvd']} with hvd; gradients are {gradients}")
    require(peaks["hvd"] < peaks["alone"] + gradients // 2, f"Horovod takes memory: {peaks}")


def capture(device: torch.device) -> None:
    """Captures in CUDA's default mode while collectives are under way, and a collective inside, which is refused."""
    x, source = torch.ones(1 << 20, device=device), torch.ones(1024, device=device)
    broken = 0
    for turn in range(20):
        handle = hvd.allreduce_async_(x, name=f"c{turn}")
        staged = hvd.allreduce_async(torch.ones(1024, dtype=torch.int16, device=device), op=hvd.Sum, name=f"s{turn}")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                doubled = source * 2
                time.sleep(0.01)
                doubled += 1
        except RuntimeError as error:
            broken += 1
            say(f"capture {turn}: {str(error).splitlines()[0]}")
        hvd.synchronize(handle)
        hvd.synchronize(staged)
    require(not broken, f"{broken} of 20 captures broke")
    say("20 captures beside collectives stayed valid")
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # what follows is refused before it is captured
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce(x)
    except ValueError as error:
        say(f"a collective inside is refused: {str(error)[:80]}")
    else:
        require(False, "a collective inside a capture was not refused")


def compiled(device: torch.device) -> None:
    """A compiled step with CUDA graphs, between eager reductions."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device)
    step: Any = torch.compile(model, mode="reduce-overhead")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for turn in range(8):
        optimizer.zero_grad()
        step(torch.full((8, 256), float(hvd.rank() + turn), device=device)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).reshape(1, -1)).cpu()
    require(all(torch.equal(each, weights[0]) for each in weights), "the ranks have different weights")
    require(bool(torch.isfinite(weights).all()), "weights are not finite")
    say("torch.compile with CUDA graphs: all ranks have the same weights")


def batchnorm(device: torch.device) -> None:
    torch.manual_seed(hvd.rank())
    layer, alone = hvd.SyncBatchNorm(8).to(device), nn.BatchNorm1d(8).to(device)
    mine = torch.randn(20 + hvd.rank(), 8, device=device)
    everything = hvd.allgather(mine)
    start = sum(20 + rank for rank in range(hvd.rank()))
    wanted = alone(everything)[start : start + len(mine)]
    buffers = dict(layer.named_buffers())
    require(torch.allclose(layer(mine).cpu(), wanted.cpu(), atol=1e-4), "SyncBatchNorm's output is wrong")
    require(
        torch.allclose(buffers["running_var"].cpu(), dict(alone.named_buffers())["running_var"].cpu(), atol=1e-4),
        "its variance is wrong",
    )
    say("SyncBatchNorm computes what one process with all batches does")


def process_group(device: torch.device) -> None:
    """Calls of ``torch.distributed`` by ``init_process_group("horovod")``, and DDP: as one process with all batches trains."""
    import torch.distributed as dist

    dist.init_process_group("horovod")
    size, rank = dist.get_world_size(), dist.get_rank()
    total = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(total)
    require(total.tolist() == [size * (size + 1) / 2] * 1000, "all_reduce")
    every = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(every, torch.full((3,), float(rank), device=device))
    require([each.tolist() for each in every] == [[float(each)] * 3 for each in range(size)], "all_gather")
    moved = torch.empty(size, device=device)
    dist.all_to_all_single(moved, torch.full((size,), float(rank), device=device))
    require(moved.tolist() == [float(each) for each in range(size)], "all_to_all_single")
    if rank == 0:
        dist.send(total, 1)
    elif rank == 1:
        received = torch.empty_like(total)
        dist.recv(received, 0)
        require(torch.equal(received, total), "send and recv")
    torch.manual_seed(0)
    alone = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    for turn in range(5):
        batches = [torch.sin(torch.arange(8 * 64.0) * (0.1 * each + turn)).reshape(8, 64) for each in range(size)]
        for trained, batch in ((model, batches[rank]), (alone, torch.cat(batches))):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            optimizer.zero_grad()
            trained(batch.to(device)).square().mean().backward()
            optimizer.step()
    near = [torch.allclose(p, q, atol=1e-5) for p, q in zip(model.module.parameters(), alone.parameters(), strict=True)]
    require(all(near), "DDP's weights differ from those of one process")
    dist.destroy_process_group()
    say("torch.distributed's calls are right, and DDP trains as one process does")


def wrapped(device: torch.device) -> None:
    """Models in DDP and FSDP train as over PyTorch's own group."""
    import torch.distributed as dist

    from horovod.check_gpu import wrapped_models

    dist.init_process_group("horovod")
    same, close = wrapped_models.compare(device)
    dist.destroy_process_group()
    say(f"the same bits as over PyTorch's own group: {', '.join(same) or 'none'}")
    if close:
        say(f"nearly the same parameters: {', '.join(close)}")


def late(device: torch.device) -> None:
    """One rank's GPU computes for longer than collectives in host memory may take; the job must go on."""
    x = torch.ones(4, device=device)
    hvd.allreduce_(x, name="first")
    begin = time.monotonic()
    if hvd.rank() == 1:
        for _ in range(6):
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # cycles: about a second
    hvd.allreduce_(x, name="late")
    wait_for(device)
    say(f"a GPU that was late was waited for {time.monotonic() - begin:.1f} seconds")


def dies(device: torch.device) -> None:
    """Rank 1 ends; the others raise an error that names it, and their device continues."""
    x = torch.ones(4, device=device)
    hvd.allreduce_(x, name="first")
    wait_for(device)
    hvd.barrier()
    if hvd.rank() == 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        for turn in range(1000):
            hvd.allreduce_(x, name=f"x{turn}")
            wait_for(device)
        require(False, "the other ranks raised no error")
    except hvd.HorovodInternalError as error:
        message = str(error)
    print(f"after {time.monotonic() - begin:.1f} seconds: {message[:160]}", flush=True)
    if "ank 1" not in message:
        raise AssertionError(f"the error does not name rank 1: {message}")
    begin = time.monotonic()
    wait_for(device)
    print(f"the device is free {time.monotonic() - begin:.2f} seconds later", flush=True)


SECTIONS: dict[str, Callable[[torch.device], None]] = {
    each.__name__: each
    for each in (
        engine, results, operations, latency, beside_torch, memory, capture, batchnorm, process_group, wrapped, late, dies,
        compiled,
    )
}  # fmt: skip
"""By name; :data:`horovod.runner.gpu_report.SECTION_SETTINGS` has their time limits."""
