"""One rank of ``benchmarks/elastic.py``: trains, is killed or sees another one killed, and notes when what has happened.

    elastic_worker.py horovodrun|torchrun FOLDER RANK

Times are those of the machine's monotonic clock, which all processes share.
"""

import time

started = time.monotonic()

import json  # noqa: E402  the clock comes first
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

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


def with_horovod() -> None:
    import horovod.torch as hvd

    hvd.init()
    model, plain = make()
    optimizer = hvd.DistributedOptimizer(plain)

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


{"horovodrun": with_horovod, "torchrun": with_torch}[sys.argv[1]]()
write_notes()
