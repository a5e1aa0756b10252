"""Gives the default group its next membership, and what was made of it the next ranks.

The group stays the same object. What was made of its last ranks ends, or is made again:

- Groups of some ranks are destroyed. Their numbers and names are of the last membership, and a process that has joined does not
  have them.
- DistributedDataParallel's reducers are made again: in all processes of the membership they begin with the same buckets, and
  nothing is left of a failed backward pass.
- Device meshes of another number of ranks are named in a warning.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from horovod.torch.distributed import ddp_reducer
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.process_group import HorovodProcessGroup

MESHES_SECONDS = 1.0
"""How long after a change a warning names device meshes of another number of ranks."""

SIZE_CHANGES = torch.__version__ >= "2.6"
"""Whether C++ code asks a group in Python for its size. Before PyTorch 2.6 it keeps the number of ranks that the group was made
with, and DistributedDataParallel divides by it."""

_log = logging.getLogger("horovod.torch")
dist: Any = torch.distributed  # its stubs lack some classes


def adopt(group: HorovodProcessGroup, found: GroupMembership, store: Any, advice: str) -> None:
    """Make the default group follow its next membership. Every member calls it, before the script goes on.

    Args:
        found: the membership, whose runtime has begun.
        store: the store for groups that the script makes from now on, in which no earlier membership has written; None: the
            same as before, whose keys are new ones.
        advice: what to do about a device mesh, for a warning.

    Raises:
        RuntimeError: this PyTorch would go on to average over the earlier number of ranks.
    """
    world, before = dist.distributed_c10d._world, group.size()
    if len(found.ranks) != before and not SIZE_CHANGES:
        raise RuntimeError(
            f"the default group had {before} ranks, and now there are {len(found.ranks)}, but PyTorch {torch.__version__} "
            f"would still divide gradients by {before}: install PyTorch 2.6 or newer, or use hvd.DistributedOptimizer."
        )
    for other in [each for each in world.pg_map if each is not group]:
        dist.destroy_process_group(other)
    if store is not None:
        world.pg_map[group] = world.pg_map[group][0], store
    group.follow(found)
    size = group.size()
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.group_count = 1  # as in a process that has only made the default group
    for model in ddp_reducer.models_of(group):
        _renew(model)
    if size != before:  # the search takes as long as a small step: ranks go on first
        threading.Timer(MESHES_SECONDS, _warn_of_meshes, (before, size, advice)).start()


def _renew(model: Any) -> None:
    """Make the reducer of a DistributedDataParallel anew, as PyTorch does when such a model is read from a file."""
    state = model.__getstate__()
    ddp_reducer.end(model.reducer)
    del model.reducer, model.logger
    model.__setstate__(state)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False  # the first backward pass of a reducer sends at its end
    if getattr(model, "mixed_precision", None) is not None:
        model.reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
    register: Callable[..., None] = dist._register_comm_hook
    for hook, state in getattr(model, "_comm_hooks", ()):
        register(model.reducer, state, hook)


def _warn_of_meshes(before: int, size: int, advice: str) -> None:
    for mesh in _device_meshes():
        _log.warning(
            "%s was made for %d ranks, and now there are %d. What was made of it, as with FSDP2, DTensor or tensor "
            "parallelism, cannot be used any more: %s.",
            mesh,
            before,
            size,
            advice,
        )


def _device_meshes() -> list[Any]:
    """The device meshes that this process has."""
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    return [] if kind is None else [each for each in gc.get_referrers(kind) if isinstance(each, kind)]
