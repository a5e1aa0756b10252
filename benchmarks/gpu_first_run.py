"""The first run on a machine with a GPU: everything that no stand-in shows, in ten minutes, one line a finding.

    python benchmarks/gpu_first_run.py                # two ranks, on one card or on two
    python benchmarks/gpu_first_run.py facts capture  # these sections alone

Each section runs under ``horovodrun -np 2`` with a time limit, and its findings are printed as they come; a section that fails
does not stop the others. On a machine without a GPU the sections run on CPUs as far as they can, and say what they leave out.
Two ranks share one card where NCCL is 2.30 or newer: that shows right results, errors and the host's costs, and no bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import horovod.torch as hvd

SECTION = "HOROVOD_BENCHMARK_SECTION"
GPUS = torch.cuda.device_count()


class Section(NamedTuple):
    """What runs on each rank, for how many seconds at most, with what limit in host memory, and whether CPUs show anything."""

    run: Callable[[torch.device], None]
    seconds: int = 60
    timeout: int = 30
    on_cpus: bool = True


def main() -> None:
    if os.environ.get(SECTION):
        work(SECTIONS[os.environ[SECTION]])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help=f"of {', '.join(SECTIONS)} (default: all)")
    options = parser.parse_args()
    failed = []
    print(
        f"PyTorch {torch.__version__}, {GPUS} GPUs, {torch.cuda.get_device_name() if GPUS else 'so on CPUs'}",
        flush=True,
    )
    for name in options.sections or SECTIONS:
        section = SECTIONS[name]
        print(f"== {name}", flush=True)
        if not GPUS and not section.on_cpus:
            print("left out: there is no GPU", flush=True)
            continue
        env = {**os.environ, **(CARD if GPUS else {}), SECTION: name, "PYTHONUNBUFFERED": "1"}
        env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(section.timeout)
        command = [sys.executable, "-c", LAUNCH, "-np", "2", sys.executable, __file__]
        try:
            status = subprocess.run(command, env=env, timeout=section.seconds).returncode
        except subprocess.TimeoutExpired:
            status = -1
            print(f"not over after {section.seconds} seconds", flush=True)
        if status and name != "dies":
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}", flush=True)
    sys.exit(bool(failed))


LAUNCH = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"
"""horovodrun, also where the package is not installed."""

CARD = {"HOROVOD_GPU_OPERATIONS": "NCCL", **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if GPUS == 1 else {})}
"""The settings of ranks with GPUs."""


def work(section: Section) -> None:
    """One rank."""
    hvd.init()
    device = torch.device("cpu")
    if GPUS:
        device = torch.device("cuda", hvd.local_rank() % GPUS)
        torch.cuda.set_device(device)
    section.run(device)
    hvd.shutdown()


def say(*words: Any) -> None:
    if hvd.rank() == 0:
        print(*words, flush=True)


def sync() -> None:
    if GPUS:
        torch.cuda.synchronize()


def microseconds(run: Callable[[], Any], times: int = 30) -> str:
    """Of the host, for one call."""
    for _ in range(5):
        run()
    sync()
    hvd.barrier()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append((time.perf_counter() - begin) * 1e6)
    sync()
    return f"{statistics.median(found):.0f} us (90th percentile {sorted(found)[int(0.9 * times)]:.0f})"


def facts(device: torch.device) -> None:
    from horovod.comm.nccl import library
    from horovod.core.lifecycle import context

    total = hvd.allreduce(torch.full((4,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
    assert total.tolist() == [3.0] * 4
    engine = context.current().device_engine
    version = library.text_of(library.loaded().version()) if engine else "-"
    say(f"engine {engine or 'for host memory'}, NCCL {version} at {library.find() or '-'}; the sum is right")


def results(device: torch.device) -> None:
    """Right numbers, and the same bits on both ranks."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for factor in (1.0, 1 / 3, 1e-8 if dtype != torch.float16 else 1e-3, 1e3):
            x = (torch.arange(100_003) % 13 + hvd.rank()).to(dtype).to(device)
            found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor)
            wanted = (torch.arange(100_003) % 13 * 2 + 1) * factor
            assert torch.allclose(found.cpu().double(), wanted.double(), rtol=2e-2), (dtype, factor)
            both = hvd.allgather(found.reshape(1, -1))
            assert torch.equal(both[0], both[1])
    say("sums with factors are right in four types, with the same bits on both ranks")


def latency(device: torch.device) -> None:
    for length in (1, 1 << 18, 1 << 22):
        x = torch.ones(length, device=device)
        whole = microseconds(lambda x=x: (hvd.allreduce_(x, name=f"whole {x.numel()}"), sync()))
        say(f"{length * 4} bytes, to the end: {whole}")
    gradients = [torch.ones(n, device=device) for n in [64, 256, 4096, 36864, 65536] * 29 + [600_000] * 16]

    def group() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="group"))

    say(f"161 tensors in a group, until the host goes on: {microseconds(group, 15)}")
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    say(f"the same beside a computing thread: {microseconds(group, 15)}")
    stop.set()
    thread.join()


def memory(device: torch.device) -> None:
    """With set_to_none the peak must not rise by the gradients."""
    peaks = {}
    for kind in ("alone", "hvd"):
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-5)
        if kind == "hvd":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = torch.randn(2048, 2048, device=device)
        for step in range(10):
            if step == 4:
                sync()
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        sync()
        peaks[kind] = torch.cuda.max_memory_allocated() >> 20
        gradients = sum(p.nbytes for p in model.parameters()) >> 20
        del model, optimizer
    say(f"peak in MiB: {peaks['alone']} alone, {peaks['hvd']} with hvd; gradients are {gradients}")


def capture(device: torch.device) -> None:
    """Captures in CUDA's default mode while collectives are under way, and a captured step between eager reductions."""
    x, source = torch.ones(1 << 20, device=device), torch.ones(1024, device=device)
    broken = 0
    for turn in range(20):
        handle = hvd.allreduce_async_(x, name=f"c{turn}")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                doubled = source * 2
                time.sleep(0.01)
                doubled += 1
        except RuntimeError as error:
            broken += 1
            say(f"capture {turn}: {str(error).splitlines()[0]}")
        hvd.synchronize(handle)
    say(f"captures that broke: {broken} of 20")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce(x)
    except ValueError as error:
        say(f"a collective inside is refused: {error}")
    assert not broken


def compiled(device: torch.device) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device)
    step: Any = torch.compile(model, mode="reduce-overhead")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for turn in range(8):
        optimizer.zero_grad()
        step(torch.full((8, 256), float(hvd.rank() + turn), device=device)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).reshape(1, -1))
    assert torch.equal(weights[0], weights[1]) and torch.isfinite(weights).all()
    say("torch.compile with CUDA graphs: both ranks have the same weights")


def batchnorm(device: torch.device) -> None:
    x = torch.randn(32, 64, 28, 28, device=device, requires_grad=True)
    for layer in (nn.BatchNorm2d(64).to(device), hvd.SyncBatchNorm(64).to(device)):
        say(
            f"{type(layer).__name__}, forward and backward: {microseconds(lambda of=layer: of(x).sum().backward(), 15)}"
        )
    torch.manual_seed(hvd.rank())
    layer, alone = hvd.SyncBatchNorm(8).to(device), nn.BatchNorm1d(8).to(device)
    mine = torch.randn(20 + hvd.rank(), 8, device=device)
    everything = hvd.allgather(mine)
    wanted = alone(everything)[:20] if hvd.rank() == 0 else alone(everything)[20:]
    assert torch.allclose(layer(mine), wanted, atol=1e-4)
    assert torch.allclose(layer.running_var, alone.running_var, atol=1e-4)
    say("SyncBatchNorm computes what one process with all batches does")


def late(device: torch.device) -> None:
    """One rank's GPU is busy for longer than host memory may be; the job must go on."""
    x = torch.ones(4, device=device)
    hvd.allreduce_(x, name="first")
    begin = time.monotonic()
    if hvd.rank() == 1:
        for _ in range(12):
            torch.cuda._sleep(2_000_000_000)
    hvd.allreduce_(x, name="late")
    sync()
    say(f"a GPU that was late was waited for {time.monotonic() - begin:.1f} seconds")


def dies(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    hvd.allreduce_(x, name="first")
    sync()
    hvd.barrier()
    if hvd.rank() == 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        for turn in range(1000):
            hvd.allreduce_(x, name=f"x{turn}")
            sync()
    except hvd.HorovodInternalError as error:
        say(f"after {time.monotonic() - begin:.1f} seconds: {str(error)[:160]}")
    begin = time.monotonic()
    sync()
    say(f"the device is free {time.monotonic() - begin:.2f} seconds later")


SECTIONS = {
    "facts": Section(facts),
    "results": Section(results),
    "latency": Section(latency),
    "memory": Section(memory, on_cpus=False),
    "capture": Section(capture, on_cpus=False),
    "compiled": Section(compiled, 120, on_cpus=False),
    "batchnorm": Section(batchnorm),
    "late": Section(late, 90, timeout=4, on_cpus=False),
    "dies": Section(dies, 60),
}


if __name__ == "__main__":
    main()
