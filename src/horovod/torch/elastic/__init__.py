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

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.core.errors import NoNextRound
from horovod.core.lifecycle import context
from horovod.elastic.loop import run_fn
from horovod.elastic.rounds import Reset
from horovod.observe.call_site import raised_at
from horovod.torch.elastic.global_batch import GlobalBatchSampler, MicroBatch
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "GlobalBatchSampler", "MicroBatch", "TorchState", "run"]

_Result = TypeVar("_Result")

# Modules that are imported with the first process group.
_ROUNDS, _FAILURES = "horovod.torch.distributed.group_rounds", "horovod.torch.distributed.failures"


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a training function so that it continues when ranks are lost, added or removed.

    Its first argument is the state. See :func:`horovod.elastic.loop.run_fn`. The default process group of
    ``torch.distributed``, if its back end is ``horovod``, becomes the group of the ranks of each round.

    The decorated function raises :class:`~horovod.elastic.rounds.NoNextRound`, a HorovodInternalError, if a collective failed
    and the job is not elastic or cannot continue; and any other error of ``func``.
    """
    return run_fn(_recognising(func), Reset(shutdown, _begin_round))


def _begin_round() -> None:
    init()
    rounds = sys.modules.get(_ROUNDS)
    if rounds is None:
        return  # this process has made no process group
    try:
        rounds.follow()
    except RuntimeError as error:  # which would count as a round that could not begin, and be tried again
        raise NoNextRound(f"A process group cannot go on in the next round: {error}") from error


def _recognising(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """``func``, which raises HorovodInternalError if C++ code has made another error of a failure that a group has told it."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> _Result:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            failures = sys.modules.get(_FAILURES)
            failure = None if failures is None else failures.behind(error)
            if failure is None:
                raise
            if context.is_initialized():
                failure.call_sites.setdefault(context.current().identity.rank, raised_at(error))
            raise failure from error

    return wrapper
