"""The arguments of ``LocalOptimizer``, and the agreement of all ranks on them."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from horovod._bindings.compression import NoneCompressor
from horovod._bindings.objects import allgather_object
from horovod.core.lifecycle.context import before_run
from horovod.core.lifecycle.process_set import global_process_set
from horovod.core.negotiation.agreement import list_ranks
from horovod.core.submission.host_process_set import host_process_set
from horovod.local_training.local_schedule import LocalSchedule
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.settings import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class LocalSettings(OptimizerSettings):
    """The checked arguments of ``LocalOptimizer``. What they have in common with those of ``DistributedOptimizer`` is about
    gradients, which the ranks of one host reduce.

    Attributes:
        schedule: when which part of the model is averaged over the hosts.
        between_hosts: what makes these averages smaller.
    """

    schedule: LocalSchedule
    between_hosts: Any = NoneCompressor

    @property
    def of_memory(self) -> OptimizerSettings:
        """Settings that say how the state of the compressor is saved."""
        return dataclasses.replace(self, compression=self.between_hosts, process_set=global_process_set)


def check_between_hosts(compression: Any, delay: int) -> None:
    """Check ``compression`` of ``LocalOptimizer``.

    Raises:
        ValueError: it is not a compressor, or one that a delay does not allow.
    """
    if isinstance(compression, BucketCompressor):
        if delay:
            raise ValueError(
                f"compression={type(compression).__name__} needs several collectives, and with delay={delay} nobody waits "
                "for the first: use delay=0, or hvd.Compression.fp16"
            )
    elif not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(f"compression={compression!r}: pass one of hvd.Compression, or a compressor of your own")


def meet(settings: LocalSettings) -> bool:
    """Check that all ranks have the same arguments, and make the process set of this host for the running generation.

    Every rank must call it. In a process that has joined an elastic job, and has not entered ``hvd.elastic.run``, it does
    nothing.

    Returns:
        Whether the process set is there.

    Raises:
        ValueError: the arguments differ, on all ranks.
        RuntimeError: ranks of a host could not connect.
        HorovodInternalError: the job has failed.
    """
    guard = before_run()
    if guard is not None and guard.alone:
        return False
    with guard.unwarned() if guard is not None else nullcontext():
        _agree(settings)
        host_process_set()
    return True


def _agree(settings: LocalSettings) -> None:
    compressor = settings.between_hosts
    kind = compressor if isinstance(compressor, type) else type(compressor)
    arguments = {each.name: getattr(settings.schedule, each.name) for each in dataclasses.fields(settings.schedule)}
    own = ", ".join(f"{name}={value}" for name, value in {**arguments, "compression": kind.__qualname__}.items())
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(allgather_object(own, name="local_optimizer")):
        ranks.setdefault(each, []).append(rank)
    if len(ranks) > 1:
        shown = "; ".join(f"{list_ranks(members)}: {text}" for text, members in ranks.items())
        raise ValueError(f"the ranks give LocalOptimizer different arguments. {shown}")
