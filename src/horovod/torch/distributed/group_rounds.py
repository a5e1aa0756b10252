"""The default process group of an elastic job: its numbers and its store in each round.

A round is a generation of the runtime, with other ranks than the one before. The default group stays the same object, to which
models and optimizers refer, and gets another membership in each round (:func:`follow`). What was made of the ranks of the last
round ends with it, or is made again:

- Groups of some ranks are destroyed. Their numbers and names are of the last round, and a process that has joined does not
  have them.
- DistributedDataParallel's reducers are made again: in all processes of the round they begin with the same buckets, and
  nothing is left of a failed backward pass.
- Device meshes of another number of ranks are named in a warning.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from horovod.core.lifecycle import context, elastic_process
from horovod.core.lifecycle.elastic_process import ElasticProcess
from horovod.environments import identity
from horovod.torch.distributed import ddp_reducer, membership
from horovod.torch.distributed.group import HorovodProcessGroup
from horovod.torch.distributed.launcher_store import LauncherStore

_log = logging.getLogger("horovod.torch")
dist: Any = torch.distributed  # its stubs lack some classes
_c10d: Any = torch.distributed.distributed_c10d


def rendezvous(time_limit: timedelta) -> Iterator[tuple[Any, int, int]]:
    """PyTorch's rendezvous handler for an elastic job: the store, this process's rank and the number of ranks.

    It starts the runtime, unless that runs: a process gets its rank from the launcher at that moment.

    Args:
        time_limit: the one of the group.
    """
    process = elastic_process.this_process()
    assert process is not None
    context.init(identity, foundation=context.Foundation(None, time_limit))
    mine = context.current().identity
    yield _store_of(process), mine.rank, mine.size


def follow() -> None:
    """Make the default group, if it is one of this back end, the group of the ranks of the runtime that has begun.

    Called in every process of an elastic job that has the group from an earlier round, before the script goes on.
    """
    group = _c10d.GroupMember.WORLD if dist.is_initialized() else None
    generation = context.current()
    if not isinstance(group, HorovodProcessGroup) or group.generation is generation:
        return
    world, size, before = _c10d._world, generation.identity.size, group.size()
    for other in [each for each in world.pg_map if each is not group]:
        dist.destroy_process_group(other)
    if _store is None:  # the script has given a store, which rounds share
        name, store = world.pg_map[group]
        store = dist.PrefixStore(f"generation {generation.generation}/", store)
        world.pg_map[group] = name, store
    else:
        store = group.get_group_store()
    group.follow(membership.of_runtime(generation, store))
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.group_count = 1  # as in a process that has only made the default group
    for model in _instances("torch.nn.parallel.distributed", "DistributedDataParallel"):
        if vars(model).get("process_group") is group and "reducer" in vars(model):
            _renew(model)
    if size != before:
        for mesh in _instances("torch.distributed.device_mesh", "DeviceMesh"):
            _log.warning(
                "%s was made for %d ranks, and now there are %d. What was made of it, as with FSDP2, DTensor or tensor "
                "parallelism, cannot be used any more: make it in the training function, which hvd.elastic.run calls again in "
                "each round.",
                mesh,
                before,
                size,
            )


_store: LauncherStore | None = None
"""Kept alive here: PyTorch holds only the C++ object."""


def _store_of(process: ElasticProcess) -> LauncherStore:
    """The store of this process, whose keys are those of the present round: a process that has joined counts its calls from
    0."""
    global _store
    if _store is None:
        _store = LauncherStore(process.connect, lambda: process.store_prefix)
    return _store


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


def _instances(module: str, name: str) -> list[Any]:
    """The objects of a class of PyTorch, and of its subclasses, that this process has."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None:
        return []
    kinds, found = [kind], []
    for each in kinds:
        kinds += each.__subclasses__()
        found += [made for made in gc.get_referrers(each) if type(made) is each]
    return found
