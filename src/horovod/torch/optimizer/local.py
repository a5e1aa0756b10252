"""``LocalOptimizer``: the ranks of a host reduce gradients in every step, and the hosts average parameters rarely."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.errors import NOT_INITIALIZED
from horovod.core.lifecycle.context import is_initialized
from horovod.core.lifecycle.process_set import global_process_set
from horovod.core.submission.host_process_set import present_host
from horovod.elastic.rounds import is_connected
from horovod.local_training.local_schedule import LocalSchedule
from horovod.local_training.outer_sgd import OuterSGD
from horovod.torch.compression import Compression, Compressor
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.data_loading import follow_data_loaders
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.local_reduction import LocalGradientOptimizer
from horovod.torch.optimizer.local_settings import LocalSettings, check_between_hosts, meet
from horovod.torch.optimizer.parameter_names import names_by_position
from horovod.torch.optimizer.settings import check_arguments
from horovod.torch.optimizer.wrapped import WrappedOptimizer, wrap

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_DILOCO = OuterSGD()


def LocalOptimizer(
    optimizer: _Optimizer,
    every: int = 50,
    outer: OuterSGD = _DILOCO,
    fragments: int = 4,
    delay: int = 0,
    compression: type[Compressor] | BucketCompressor = Compression.none,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    mixing: float | None = None,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
) -> _Optimizer:
    """Train each host on its own, and average the hosts every ``every`` steps: for networks that are too slow for gradients.

    The ranks of one host reduce their gradients in every step, as with ``DistributedOptimizer``. The parameters are divided
    into fragments of about equal size. Every ``every`` steps, each rank sends *outer minus local parameter* of a fragment, and
    the outer optimizer steps with the average over all ranks. Ranks continue with the outer parameters (DiLoCo,
    arXiv:2311.08105; with fragments and a delay, Streaming DiLoCo, arXiv:2501.18512). A job of one host makes outer steps, too.

    All ranks must call it, and make the same number of steps. Returns an optimizer of a class derived from that of
    ``optimizer``, with the methods of ``DistributedOptimizer`` and ``finish_round()``. Outer parameters and momentum take two
    copies of the parameters that are trained. Buffers, such as running statistics, stay those of each rank.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Its state, such as momentum, stays on its host.
        every: the number of steps between two averages of a parameter.
        outer: the outer optimizer, an ``hvd.OuterSGD``.
        fragments: how many parts of the model are averaged at different steps, so that the network is used evenly. At most
            ``every`` and at most the number of parameters.
        delay: how many steps training goes on while a fragment travels; less than ``every``. 0: ranks wait for it.
        compression: of the changes between hosts: one of ``hvd.Compression``, or your own compressor. A ``BucketCompressor``
            needs ``delay=0``.
        named_parameters: ``model.named_parameters()``. Outer states are saved by name.
        mixing: the share of the local parameter in what a rank continues with when a fragment arrives, at least 0 and below 1.
            None: 0 without a delay, otherwise 0.5.
        backward_passes_per_step, sparse_as_dense: as for ``DistributedOptimizer``.

    Raises:
        ValueError: an argument is wrong, not initialised, or the ranks have different arguments. The text says which.
        RuntimeError: ranks of a host could not connect.
        HorovodInternalError: the job has failed.
    """
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError("this optimizer is distributed already; wrap the original with hvd.LocalOptimizer")
    if not is_initialized():
        raise ValueError(NOT_INITIALIZED)
    schedule = LocalSchedule.checked(every, outer, fragments, delay, mixing)
    check_between_hosts(compression, schedule.delay)
    common = check_arguments(
        optimizer,
        named_parameters,
        Compression.none,
        backward_passes_per_step,
        ReduceOp.AVERAGE,
        1.0,
        0,
        None,
        sparse_as_dense,
        global_process_set,
    )
    trained = sum(p.requires_grad for p in names_by_position(optimizer))
    if schedule.fragments > max(trained, 1):
        raise ValueError(
            f"fragments={schedule.fragments}: the optimizer has {trained} parameters to train; use at most that many fragments"
        )
    given = {each.name: getattr(common, each.name) for each in fields(common)}
    settings = LocalSettings(**{**given, "process_set": present_host()}, schedule=schedule, between_hosts=compression)
    if not is_connected():  # otherwise ranks meet in hvd.elastic.run
        meet(settings)
    signature: Any = [(settings.names[p], tuple(p.shape), str(p.dtype)) for p in names_by_position(optimizer)]
    follow_data_loaders()
    wrapped: _Optimizer = wrap(
        optimizer, LocalGradientOptimizer, settings, OptimizerIdentity(signature, settings.process_set)
    )
    return wrapped
