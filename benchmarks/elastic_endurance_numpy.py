"""One rank of ``benchmarks/elastic_endurance.py``: fits a line by gradient descent until a file tells it to end.

elastic_endurance_numpy.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod.common.objects import broadcast_object
from horovod.core.submission import collectives
from horovod.core.submission.tensor import Tensor

SAMPLES, FEATURES = 512, 64
PAUSE_SECONDS = 0.01
"""After each step, so that processes that start get some of the machine."""
LOG_SECONDS = 0.25

folder = Path(sys.argv[1])
generator = np.random.default_rng(1)
# Each feature is learned at a pace of its own, so that there is something to learn all the time.
inputs = np.linalg.qr(generator.normal(size=(SAMPLES, FEATURES)))[0] * np.logspace(0, -2.5, FEATURES)
answers = inputs @ (generator.normal(size=FEATURES) / np.logspace(0, -2.5, FEATURES))


def main() -> None:
    basics.init()
    state = ObjectState(
        broadcast_object, basics.rank, weights=np.zeros(FEATURES), step=0, over=False, logged=0.0, losses=[]
    )
    run_fn(train, Reset(basics.shutdown, basics.init))(state)


def train(state: ObjectState) -> None:
    write(folder / f"member.{os.getpid()}", os.environ["HOROVOD_ELASTIC_ROUND"])
    while not state.over:
        own = slice(basics.rank(), None, basics.size())
        error = inputs[own] @ state.weights - answers[own]
        ends = basics.rank() == 0 and (folder / "end").exists()
        gradient, loss, over = np.split(
            total([*(inputs[own].T @ error), error @ error, ends]), [FEATURES, FEATURES + 1]
        )
        state.weights = state.weights - 0.5 * gradient
        state.step += 1
        state.over = bool(over[0])
        state.losses = [*state.losses, float(loss[0])]
        if time.monotonic() > state.logged + LOG_SECONDS:
            log(state)
            state.losses, state.logged = [], time.monotonic()
        time.sleep(PAUSE_SECONDS)
        state.commit()


def total(values: list[float]) -> np.ndarray:
    """The sum over all ranks."""
    source = np.array(values)
    target = np.empty_like(source)
    described = [Tensor(array, DataType.FLOAT64, array.shape) for array in (source, target)]
    collectives.allreduce("allreduce", "step", described[:1], described[1:], ReduceOp.SUM, awaited=True).wait()
    return target


def log(state: ObjectState) -> None:
    if basics.rank() == 0:
        entry = {
            "at": time.monotonic(),
            "step": state.step,
            "loss": sum(state.losses) / len(state.losses),
            "size": basics.size(),
            "round": int(os.environ["HOROVOD_ELASTIC_ROUND"]),
        }
        with (folder / "log").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def write(path: Path, text: str) -> None:
    """All at once, for who reads it meanwhile."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.rename(path)


if __name__ == "__main__":
    main()
