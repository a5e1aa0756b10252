"""One rank of ``benchmarks/elastic_endurance.py``: fits a line by gradient descent until a file tells it to end.

elastic_endurance_numpy.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from elastic_endurance_log import BEGINNING, PAUSE_SECONDS, RankLog

from horovod._bindings.objects import broadcast_object
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives

SAMPLES, FEATURES = 512, 64

log = RankLog(Path(sys.argv[1]))
generator = np.random.default_rng(1)
# Each feature is learned at a pace of its own, so that there is something to learn all the time.
inputs = np.linalg.qr(generator.normal(size=(SAMPLES, FEATURES)))[0] * np.logspace(0, -2.5, FEATURES)
answers = inputs @ (generator.normal(size=FEATURES) / np.logspace(0, -2.5, FEATURES))


def main() -> None:
    basics.init()
    state = ObjectState(broadcast_object, basics.rank, weights=np.zeros(FEATURES), **BEGINNING)
    run_fn(train, Reset(basics.shutdown, basics.init))(state)


def train(state: ObjectState) -> None:
    log.begin_round()
    while not state.over:
        own = slice(basics.rank(), None, basics.size())
        error = inputs[own] @ state.weights - answers[own]
        sums = total([*(inputs[own].T @ error), error @ error, log.is_to_end()])
        gradient, loss, over = np.split(sums, [FEATURES, FEATURES + 1])
        state.weights = state.weights - 0.5 * gradient
        state.over = bool(over[0])
        log.end_step(state, float(loss[0]))
        time.sleep(PAUSE_SECONDS)
        state.commit()


def total(values: list[float]) -> np.ndarray:
    """The sum over all ranks."""
    source = np.array(values)
    target = np.empty_like(source)
    described = [Tensor(array, DataType.FLOAT64, array.shape) for array in (source, target)]
    collectives.allreduce("allreduce", "step", described[:1], described[1:], ReduceOp.SUM, awaited=True).wait()
    return target


if __name__ == "__main__":
    main()
