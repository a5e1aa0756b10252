"""One rank of ``tests/elastic_events.py``: trains in whole numbers, so that the result has the same bits for any ranks.

    elastic_events_rank.py FOLDER

It writes to the folder

    member.NUMBER   the round that the process of this number trains in
    progress        by rank 0: the steps that the job has made, and the round
    result.NUMBER   at the end: the step, a digest of the weights, and the sizes of the rounds
    early.NUMBER    if it ends early: how

It looks for

    end             the ranks finish
    early           a process, and how it ends early: by return, sys.exit or os._exit
    newcomer.HOW    the next process that starts takes it, and exits before init(), or calls a collective before hvd.elastic.run
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.int64]

SAMPLES = 24
WEIGHTS = 20_000
MODULUS = 1_000_003
PAUSE_SECONDS = 0.01
"""After each step, so that processes that start get some of the machine."""


def first_weights() -> Weights:
    return np.arange(WEIGHTS, dtype=np.int64)


def gradient(weights: Weights, step: int, samples: range) -> Weights:
    """The sum of the gradients of some samples."""
    total = np.zeros_like(weights)
    for sample in samples:
        total += (weights * (sample + 3) + step * sample) % MODULUS
    return total


def digest(weights: Weights) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()


def undisturbed(steps: int) -> str:
    """The digest after so many steps of one process."""
    weights = first_weights()
    for step in range(steps):
        weights = (weights + gradient(weights, step, range(SAMPLES))) % MODULUS
    return digest(weights)


def judge(results: Sequence[Sequence[Any]]) -> str:
    """What is wrong with the ranks' results; "" if they are right."""
    steps = {step for step, _, _ in results}
    right = len(steps) == 1 and {found for _, found, _ in results} == {undisturbed(max(steps))}
    return "" if right else f"wrong results: {results}"


def takes(path: Path, number: str) -> bool:
    """Whether this process is the one that takes a file."""
    try:
        path.rename(path.with_name(f"{path.name}.{number}"))
    except FileNotFoundError:
        return False
    return True


def writer(folder: Path, number: str) -> Callable[[str, str], None]:
    """A function that writes a file of the folder, all at once for who reads it meanwhile."""

    def write(name: str, text: str) -> None:
        new = folder / f".{name}.{number}"
        new.write_text(text)
        new.rename(folder / name)

    return write


def returns_early(folder: Path, number: str) -> bool:
    """Whether this process is to return from the training function now. It ends here if it is to end in another way."""
    path = folder / "early"
    if not path.exists():
        return False
    process, how = path.read_text().split()
    if process != number:
        return False
    writer(folder, number)(f"early.{number}", how)
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)
    return True


def main() -> None:
    from horovod._bindings.objects import broadcast_object
    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.common import basics
    from horovod.common.elastic import ObjectState, Reset, run_fn
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    folder, number = Path(sys.argv[1]), os.environ["HOROVOD_ELASTIC_PROCESS"]
    if takes(folder / "newcomer.exits", number):
        return
    calls = takes(folder / "newcomer.calls", number)
    basics.init()
    if calls:
        broadcast_object(number)
    state = ObjectState(broadcast_object, basics.rank, step=0, weights=first_weights(), over=False)
    state.sync()
    sizes: list[int] = []

    write = writer(folder, number)

    def summed(values: Weights) -> Weights:
        result = np.empty_like(values)
        tensors = [Tensor(each, DataType.INT64, each.shape) for each in (values, result)]
        collectives.allreduce("allreduce", "gradient", tensors[:1], tensors[1:], ReduceOp.SUM, awaited=True).wait()
        return result

    def train(state: ObjectState) -> None:
        sizes.append(basics.size())
        training_round = os.environ["HOROVOD_ELASTIC_ROUND"]
        write(f"member.{number}", training_round)
        while not state.over:
            if returns_early(folder, number):
                return
            own = range(basics.rank(), SAMPLES, basics.size())
            ends = basics.rank() == 0 and (folder / "end").exists()
            *values, over = summed(np.append(gradient(state.weights, state.step, own), int(ends)))
            state.weights = (state.weights + np.array(values)) % MODULUS
            state.step, state.over = state.step + 1, bool(over)
            if basics.rank() == 0:
                write("progress", f"{state.step} {training_round}")
            time.sleep(PAUSE_SECONDS)
            state.commit()

    run_fn(train, Reset(basics.shutdown, basics.init))(state)
    if not state.over:
        return  # early
    write(f"result.{number}", json.dumps([state.step, digest(state.weights), sizes]))


if __name__ == "__main__":
    main()
