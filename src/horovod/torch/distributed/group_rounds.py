"""The default process group of an elastic job: its numbers and its store in each round.

A round is a generation of the runtime, with other ranks than the one before. The default group stays the same object, to which
models and optimizers refer, and gets another membership in each round (:func:`follow`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from horovod.core.lifecycle import context, elastic_process
from horovod.core.lifecycle.elastic_process import ElasticProcess
from horovod.environments import identity
from horovod.torch.distributed import membership
from horovod.torch.distributed.launcher_store import LauncherStore
from horovod.torch.distributed.next_membership import adopt
from horovod.torch.distributed.process_group import HorovodProcessGroup

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
    store = None
    if _store is None:  # the script has given a store, which rounds share
        store = dist.PrefixStore(f"generation {generation.generation}/", _c10d._world.pg_map[group][1])
    found = membership.of_runtime(generation, group.get_group_store() if store is None else store)
    adopt(group, found, store, "make it in the training function, which hvd.elastic.run calls again in each round")


_store: LauncherStore | None = None
"""Kept alive here: PyTorch holds only the C++ object."""


def _store_of(process: ElasticProcess) -> LauncherStore:
    """The store of this process, whose keys are those of the present round: a process that has joined counts its calls from
    0."""
    global _store
    if _store is None:
        _store = LauncherStore(process.connect, lambda: process.store_prefix)
    return _store
