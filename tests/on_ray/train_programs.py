"""Programs with Ray Train: ``python train_programs.py NAME ARGUMENTS`` on the head of a cluster. The last line is the
result, in JSON.

Steps and data are those of ``elastic_ddp_rank``: each rank of each step has data of its own, so the result shows which ranks
made which steps. An elastic training takes a folder that all hosts share, in which its processes write what they see.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

WORKERS = 4
EPOCHS = 4
STEPS = 5
"""In an epoch."""


def of_way(way: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The model and the optimizer, made distributed by ``hvd.DistributedOptimizer`` or by DDP."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    if way == "hvd":
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return torch.nn.parallel.DistributedDataParallel(model), optimizer


def report(metrics: dict[str, Any], saved: Any) -> None:
    """Report to Ray, with a checkpoint if there is something to save."""
    import torch

    if saved is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder) / "saved.pt")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def train_fixed(options: dict[str, Any]) -> None:
    """Runs on a rank: one of them fails once, and all begin again at the last checkpoint."""
    import torch

    import horovod.torch as hvd
    from elastic_ddp_rank import loss_of, made, values_of

    plain, sgd = made()
    model, optimizer = of_way(options["way"], plain, sgd)
    begin, worker = 0, ray.train.get_context().get_world_rank()
    found = ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as folder:
            saved = torch.load(Path(folder) / "saved.pt")
        begin = saved["epoch"]
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(begin, EPOCHS):
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
            if step == 12 and found is None and hvd.rank() == 2:
                if options["fails"] == "raise":
                    raise ValueError("no data on this rank")
                os._exit(3)
        numbers = {"epoch": epoch + 1, "begin": begin, "ranks": [hvd.rank(), hvd.local_rank(), hvd.size(), worker]}
        saved = {"epoch": epoch + 1, "model": plain.state_dict(), "optimizer": optimizer.state_dict()}
        report({**numbers, "values": values_of(plain)}, saved if hvd.rank() == 0 else None)


def train_elastic(options: dict[str, Any]) -> None:
    """Runs on a rank: trains until rounds of so many ranks have been seen, one after another. One process kills itself."""
    import horovod.torch as hvd
    from elastic_ddp_rank import loss_of, made, values_of

    folder = Path(options["folder"])
    plain, sgd = made()
    model, optimizer = of_way(options["way"], plain, sgd)
    seen = (folder / f"{os.uname().nodename}.{os.getpid()}").open("a", buffering=1)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left and state.step < 20_000:
            size = hvd.size()
            optimizer.zero_grad()
            loss_of(model, state.step, hvd.rank()).backward()
            optimizer.step()
            seen.write(json.dumps([state.step, size, hvd.local_rank(), time.time()]) + "\n")
            if state.runs and state.runs[-1][0] == size:
                state.runs = [*state.runs[:-1], [size, state.runs[-1][1] + 1]]
            else:
                state.runs = [*state.runs, [size, 1]]
            if size == state.left[0] and state.runs[-1][1] >= 20:
                state.left = state.left[1:]
                if hvd.rank() == 0:
                    (folder / f"{size}.seen").touch()
            state.step += 1
            if state.step % 10 == 0:
                report({"step": state.step, "size": size}, plain.state_dict() if hvd.rank() == 0 else None)
            marker = folder / "killed"
            if options["kills"] and state.step == 30 and hvd.rank() == int(options["kills"]) and not marker.exists():
                marker.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(
                0.05
            )  # a step that takes as long as a small model's, so that Ray has replaced a worker before the end
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, step=0, left=options["sizes"], runs=[])
    train(state)
    final = {"runs": state.runs, "left": state.left, "size": hvd.size(), "values": values_of(plain)}
    (folder / f"final.{os.uname().nodename}.{os.getpid()}").write_text(json.dumps(final))


def trainer(train: Callable[..., None], way: str, options: dict[str, Any], failures: int, **config: Any) -> Any:
    """The trainer of Ray for one of the ways."""
    shared: dict[str, Any] = {
        "train_loop_config": {"way": way, **options},
        "scaling_config": ScalingConfig(num_workers=WORKERS),
        "run_config": RunConfig(
            storage_path=str(Path.cwd() / "results"), failure_config=FailureConfig(max_failures=failures)
        ),
    }
    if way == "ddp":
        from horovod.ray.train.torch import TorchConfig

        return TorchTrainer(train, torch_config=TorchConfig(**config), **shared)
    from horovod.ray.train import HorovodConfig

    return DataParallelTrainer(train, backend_config=HorovodConfig(**config), **shared)


def fixed(way: str, fails: str) -> Any:
    """A job of fixed size, in which a rank fails once."""
    result = trainer(train_fixed, way, {"fails": fails}, failures=1).fit()
    return {"metrics": result.metrics, "checkpoint": result.checkpoint is not None}


def without_retry() -> Any:
    """The error of a rank, when Ray may not start the workers again."""
    try:
        trainer(train_fixed, "hvd", {"fails": "raise"}, failures=0).fit()
    except Exception as error:
        return str(error)


def elastic(way: str, kills: str, *sizes: str) -> Any:
    """An elastic job. Says when it has so many ranks."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    print(f"folder: {folder}", flush=True)
    options = {"folder": str(folder), "kills": "" if kills == "-" else kills, "sizes": list(map(int, sizes))}
    result = trainer(train_elastic, way, options, failures=3, min_workers=1).fit()
    return {
        "metrics": result.metrics,
        "killed": [float(path.read_text()) for path in folder.glob("killed")],
        "seen": {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in folder.iterdir()
            if path.name.startswith("host")
        },
        "final": {
            path.name.removeprefix("final."): json.loads(path.read_text()) for path in sorted(folder.glob("final.*"))
        },
    }


PROGRAMS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (fixed, without_retry, elastic)}


if __name__ == "__main__":
    ray.init()
    found = PROGRAMS[sys.argv[1]](*sys.argv[2:])
    ray.shutdown()  # it ends the thread that shows what Ray says, which might come into the middle of a long line
    print(f"result: {json.dumps(found)}", flush=True)
