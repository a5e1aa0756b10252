"""What a collective on a GPU costs the host, without a GPU: NCCL's calls on the library of the tests that stands in for it.

    python benchmarks/device_calls.py

What is measured, and how
    queueing      one ``ncclAllReduce`` for each of ResNet-50's 161 gradients, in one group: the time from the first call to the
                  end of the group. Alone, and beside a Python thread that computes, which keeps the interpreter lock for 5 ms.
                  Through functions that give up the lock in each call (``CDLL``), and through those that keep it (``PyDLL``).
    settling      one collective, from its first call to the moment when NCCL has put it on its stream, which takes the
                  stand-in's thread 10 us: the handle sleeps between its questions at once, or yields its core first.
    All contenders take turns, each in another order each round. Medians, means, and the 90th percentiles.

The stand-in is built with the machine's C compiler. It tells nothing of GPUs: only what the calls cost around it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

import native_devices
from horovod.comm.cuda.library import Cuda
from horovod.comm.cuda.runtime import CudaRuntime
from horovod.comm.nccl import handle as handles
from horovod.comm.nccl import library
from horovod.comm.nccl.handle import CommHandle
from horovod.comm.nccl.library import Nccl
from horovod.comm.spans import address_of

TENSORS = 161


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if native_devices.compiler() is None:
        sys.exit("There is no C compiler for the library that stands in for NCCL: install cc, or set CC.")
    with tempfile.TemporaryDirectory() as folder:
        path = native_devices.build(Path(folder))
        with native_devices.loaded(path) as stand_in:
            stand_in.behave(late=0.0)
            queueing(path, options.rounds)
            settling(path, options.rounds)


def communicator(path: str, keeping: bool) -> tuple[CommHandle, CudaRuntime, Any]:
    """A communicator of one rank.

    Args:
        keeping: calls that only queue keep the interpreter lock, as they do.
    """
    before = library._KEEP_INTERPRETER_LOCK
    library._KEEP_INTERPRETER_LOCK = before if keeping else frozenset()
    try:
        nccl = Nccl.load(path)
    finally:
        library._KEEP_INTERPRETER_LOCK = before
    runtime = CudaRuntime(Cuda.load(path), 0)
    made = CommHandle.create(nccl, runtime, 0, 1, os.urandom(128), time.monotonic() + 20, 20.0)
    return made, runtime, runtime.new_stream()


def queueing(path: str, rounds: int) -> None:
    word = np.zeros(1, np.float32)
    contenders = {name: communicator(path, keeping) for name, keeping in (("CDLL", False), ("PyDLL", True))}

    def queue(name: str) -> float:
        made, runtime, stream = contenders[name]
        with runtime.chosen():
            begin = time.perf_counter()
            with made.group():
                for _ in range(TENSORS):
                    made.call(
                        "ncclAllReduce", address_of(word), address_of(word), 1, 7, 0, made.address, stream.address
                    )
                queued = time.perf_counter()
        return queued - begin

    print(f"queueing {TENSORS} tensors:{'median':>23} {'mean':>11} {'p90':>11}")
    show(in_turns({f"{name}, alone": lambda name=name: queue(name) for name in contenders}, rounds))
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        beside = {f"{name}, beside a computing thread": lambda name=name: queue(name) for name in contenders}
        show(in_turns(beside, rounds))
    finally:
        stop.set()
        thread.join()
    for made, _, _ in contenders.values():
        made.close()


def settling(path: str, rounds: int) -> None:
    word = np.zeros(1, np.float32)
    made, runtime, stream = communicator(path, True)

    def reduce(yields: float) -> float:
        before, handles._YIELD_SECONDS = handles._YIELD_SECONDS, yields
        try:
            with runtime.chosen():
                begin = time.perf_counter()
                with made.group():
                    made.call(
                        "ncclAllReduce", address_of(word), address_of(word), 1, 7, 0, made.address, stream.address
                    )
                return time.perf_counter() - begin
        finally:
            handles._YIELD_SECONDS = before

    print(f"one collective:{'median':>29} {'mean':>11} {'p90':>11}")
    now = handles._YIELD_SECONDS
    show(
        in_turns(
            {"sleeps at once": lambda: reduce(0.0), f"yields for {now * 1e6:.0f} us": lambda: reduce(now)}, rounds * 5
        )
    )
    made.close()


def in_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each contender's seconds, by round."""
    order, shuffled = list(contenders), random.Random(1)
    found: dict[str, list[float]] = {name: [] for name in order}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            found[name].append(contenders[name]())
    return found


def show(found: dict[str, list[float]]) -> None:
    for name, seconds in found.items():
        last = sorted(seconds)[int(0.9 * len(seconds))]
        columns = (statistics.median(seconds), statistics.mean(seconds), last)
        print(f"    {name:<32}", *(f"{each * 1e6:8.0f} us" for each in columns))


if __name__ == "__main__":
    main()
