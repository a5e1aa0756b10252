"""One rank of ``benchmarks/elastic.py``: trains, is killed or sees another one killed, and notes when what has happened.

    elastic_worker.py CONTENDER FOLDER RANK

The contenders are those of ``elastic_contenders.py``; RANK is the rank that is killed.

Times are those of the machine's monotonic clock, which all processes share.
"""

import time

started = time.monotonic()

import json  # noqa: E402  the clock comes first
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

KILL_AT, STEPS, BATCH = 15, 30, 32
folder, victim = Path(sys.argv[2]), int(sys.argv[3])
notes: dict[str, float] = {"started": started, "imported": time.monotonic()}


def note(what: str) -> None:
    notes[what] = time.monotonic()


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step; the victim gets no further than to its first forward pass."""
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if rank == victim and step == KILL_AT and not (folder / "killed").exists():
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()


def write_notes() -> None:
    (folder / f"notes.{os.getpid()}").write_text(json.dumps(notes))


def with_horovod(ddp: bool) -> None:
    import horovod.torch as hvd

    model: torch.nn.Module
    if ddp:
        torch.distributed.init_process_group("horovod")
        plain, optimizer = make()
        model = torch.nn.parallel.DistributedDataParallel(plain)
    else:
        hvd.init()
        model, local = make()
        optimizer = hvd.DistributedOptimizer(local)

    class Noted(hvd.elastic.TorchState):
        def restore(self) -> None:
            note("noticed")
            super().restore()

        def reset(self) -> None:
            note("met")
            super().reset()

    state = Noted(model, optimizer, step=0, rollback="step")

    @hvd.elastic.run
    def train(state: Noted) -> None:
        note("synchronised")
        first = True
        while state.step < STEPS:
            train_step(model, optimizer, hvd.rank(), state.step)
            if first:
                note("step")
            first = False
            state.step += 1
            state.commit()

    train(state)


def with_torch() -> None:
    import torch.distributed as dist

    # A place to meet of its own for each life: after a restart Gloo may find addresses of the processes before.
    place = folder / f"store.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    model, optimizer = make()
    step, checkpoint = 0, folder / "checkpoint"
    if checkpoint.exists():
        kept = torch.load(checkpoint)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    note("met")
    for number in range(step, STEPS):
        train_step(wrapped, optimizer, dist.get_rank(), number)
        if "step" not in notes:
            note("step")
        if dist.get_rank() == 0:
            contents = {"step": number + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(contents, folder / "new")
            (folder / "new").rename(checkpoint)
    dist.destroy_process_group()


def with_torchft() -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class LastingDDP(DistributedDataParallel):
        """torchft's, whose own hook (0.2.0) ends the process with an AssertionError once an allreduce has failed."""

        @staticmethod
        def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are texts
            state.allreduce(bucket.buffer()).wait()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    rank, size, limit = (
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        timedelta(milliseconds=int(os.environ["PATIENCE_MILLISECONDS"])),
    )
    model, plain = make()

    def load(kept: dict[str, Any]) -> None:
        model.load_state_dict(kept["model"])
        plain.load_state_dict(kept["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=size - 1,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{rank}",
        hostname="localhost",
        heartbeat_interval=limit / 10,
        init_sync=False,  # all begin with the same weights
    )
    (folder / f"ready.{rank}").touch()
    while len(list(folder.glob("ready.*"))) < size:  # else the first steps are made without the slowest
        time.sleep(0.01)
    wrapped, optimizer = LastingDDP(manager, model), Optimizer(manager, plain)
    while manager.current_step() < STEPS:
        number, began = manager.current_step(), time.monotonic()
        train_step(wrapped, optimizer, rank, number)
        if "step" in notes or not (folder / "killed").exists():
            continue
        committed = manager.current_step() > number
        if not committed and "noticed" not in notes:
            note("noticed")  # this step is given up
        elif committed and ("noticed" in notes or began > float((folder / "killed").read_text())):
            notes.setdefault("noticed", began)  # it has waited for a quorum when the other was killed
            note("step")
    manager.shutdown(wait=False)


{
    "horovodrun": lambda: with_horovod(ddp=False),
    "horovodrun, DDP": lambda: with_horovod(ddp=True),
    "torchft": with_torchft,
    "torchrun": with_torch,
}[sys.argv[1]]()
write_notes()
