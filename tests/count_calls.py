"""Counts the files and functions of ``src/horovod`` that one call of a script enters on rank 0 of two on one host, in all
threads of that rank, once the same call has been made often before.

    python tests/count_calls.py                        # the numbers of every call in CALLS
    python tests/count_calls.py --names                # and what is counted
    python tests/count_calls.py "dist.all_reduce"      # of one call

A function counts once a call, however often it is entered. So does a lambda, a generator or a comprehension that Python runs
in a frame. A call for which a rank is late enters others, so the one of many calls that enters the fewest counts.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ranks import RankPool

Prepare = Callable[[], Callable[[], object]]
"""Runs on every rank: makes what a call needs, and returns the call."""


class Function(NamedTuple):
    """One function: its file below ``src/horovod``, its name, and the line where it begins."""

    file: str
    name: str
    line: int


def allreduce(nbytes: int, name: str | None = None) -> Prepare:
    """A blocking ``hvd.allreduce`` of a tensor of so many bytes."""

    def prepare() -> Callable[[], object]:
        import torch

        import horovod.torch as hvd

        tensor = torch.ones(nbytes // 4)
        return lambda: hvd.allreduce(tensor, name=name)

    return prepare


def all_reduce() -> Callable[[], object]:
    """``dist.all_reduce`` of a tensor of 4 KB."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1024)
    return lambda: dist.all_reduce(tensor)


def ping_pong() -> Callable[[], object]:
    """``dist.send`` of 4 KB to the other rank, and ``dist.recv`` of its answer."""
    import torch
    import torch.distributed as dist

    tensor, other = torch.ones(1024), 1 - dist.get_rank()

    def call() -> None:
        for act in (dist.send, dist.recv) if other else (dist.recv, dist.send):
            act(tensor, other)

    return call


def optimizer_step() -> Callable[[], object]:
    """Backward and step of a ``DistributedOptimizer`` of four parameters."""
    import torch

    import horovod.torch as hvd

    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    batch = torch.ones(8, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


CALLS: dict[str, Prepare] = {
    "hvd.allreduce of 4 KB": allreduce(4 << 10),
    "hvd.allreduce of 4 KB with a name": allreduce(4 << 10, "calls.of.4K"),
    "hvd.allreduce of 40 MB": allreduce(40 << 20),
    "hvd.allreduce of 40 MB with a name": allreduce(40 << 20, "calls.of.40M"),
    "dist.all_reduce of 4 KB": all_reduce,
    "dist.send and dist.recv of 4 KB": ping_pong,
    "a step with four parameters": optimizer_step,
}
"""A tensor of 4 KB fits into shared memory beside a proposal. One of 40 MB is carried out by the worker thread."""


def count(pool: RankPool, call: str, calls: int = 100) -> list[Function]:
    """The functions that one call enters on rank 0, in the order in which they are entered first."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[Function] = pool.run(_measure, CALLS[call], calls, f"{folder}/store")[0]
    return found


def files(functions: Sequence[Function]) -> list[str]:
    """Their files, in the order in which they are entered."""
    return list(dict.fromkeys(function.file for function in functions))


def _measure(prepare: Prepare, calls: int, store: str) -> list[Function]:
    """Runs on every rank: the fewest functions that one of the later half of the calls has entered."""
    import torch.distributed as dist

    import horovod
    import horovod.torch as hvd

    entered: dict[Any, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code] = None

    root = str(Path(horovod.__file__).parent) + "/"
    threading.setprofile(note)  # for the threads that init() starts
    sys.setprofile(note)
    try:
        hvd.init()
        path = dist.FileStore(store, hvd.size())
        dist.init_process_group("horovod", store=path, rank=hvd.rank(), world_size=hvd.size())
        call = prepare()
        seen = []
        for _ in range(calls):
            hvd.barrier()
            entered.clear()
            call()
            seen.append([code for code in list(entered) if code.co_filename.startswith(root)])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        hvd.shutdown()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
    fewest = min(seen[calls // 2 :], key=len)
    return [
        Function(code.co_filename.removeprefix(root), getattr(code, "co_qualname", code.co_name), code.co_firstlineno)
        for code in fewest
    ]


def main(arguments: Sequence[str]) -> None:
    wanted = [each for each in arguments if not each.startswith("-")]
    pool = RankPool(2, framework="torch")
    try:
        for call in CALLS:
            if wanted and not any(each in call for each in wanted):
                continue
            found = count(pool, call)
            print(f"{call}: {len(found)} functions in {len(files(found))} files")
            for file in files(found) if "--names" in arguments else ():
                print(f"    {file}: {', '.join(function.name for function in found if function.file == file)}")
    finally:
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
