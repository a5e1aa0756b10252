"""broadcast of one rank's array to all ranks, as a new array or in place."""

from __future__ import annotations

from typing import Any

from horovod.core.lifecycle.context import worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.submission.arguments import full_name
from horovod.core.submission.requests import checked_root, prepared_call
from horovod.mxnet.ops.arguments import whole
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import in_place, specs, submit

PREFIX = "horovod_broadcast"


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The array of global rank ``root_rank``, as a new NDArray on every member of ``process_set``. Every member must call it.

    Shapes and dtypes must agree. Like :func:`horovod.mxnet.ops.allreduce.allreduce` it returns immediately.

    Args:
        tensor: an NDArray of a dtype as for :func:`horovod.mxnet.ops.allreduce.allreduce`.
        root_rank: the global rank whose array is sent.
        name: identifies the call. Calls without a name are matched by their order.
        priority: the priority in MXNet's engine.
        process_set: the ranks that take part. This rank must be a member.

    Raises:
        ValueError: the root is not a member. Otherwise as :func:`horovod.mxnet.ops.allreduce.allreduce`.
    """
    with of_both_kinds():
        specs([tensor], name or PREFIX)
        return broadcast_(tensor.copy(), root_rank, name, priority, process_set)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """:func:`broadcast` in place, with the same arguments and errors. Returns ``tensor``. The root's array does not change."""
    with of_both_kinds():
        root, priority = whole(root_rank, "root_rank"), whole(priority, "priority")
        described = specs([tensor], name or PREFIX)
        ranks = worker_of(process_set.process_set_id, Operation.BROADCAST).ranks
        root = checked_root(root, ranks, full_name(PREFIX, name) or PREFIX)
        call = prepared_call(Operation.BROADCAST, PREFIX, name, described, root=root)
        in_place([tensor], lambda hosts: submit(process_set, call.request, [], hosts, priority))
    return tensor
