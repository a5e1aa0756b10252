"""Elastic training with PyTorch.

Every rank runs a script with these lines::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.elastic.loop import run_fn
from horovod.elastic.rounds import Reset
from horovod.torch.elastic.global_batch import GlobalBatchSampler, MicroBatch
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "GlobalBatchSampler", "MicroBatch", "TorchState", "run"]

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a training function so that it continues when ranks are lost, added or removed.

    Its first argument is the state. See :func:`horovod.elastic.loop.run_fn`.

    The decorated function raises :class:`~horovod.elastic.rounds.NoNextRound`, a HorovodInternalError, if a collective failed
    and the job is not elastic or cannot continue; and any other error of ``func``.
    """
    return run_fn(func, Reset(shutdown, init))
