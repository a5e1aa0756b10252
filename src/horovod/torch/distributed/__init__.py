"""A back end of ``torch.distributed`` over Horovod's engines: ``torch.distributed.init_process_group("horovod")``.

    making          makes a group when PyTorch asks for one
    store           exchanges data among the ranks of a group through the group's store
    membership      makes a group a process set of the runtime, and starts the runtime if it does not run
    base            the common base of groups: operations, time limit, end
    group           a ProcessGroup in Python
    backend         a Backend in Python, from PyTorch 2.15 on: one of several back ends of a group, or the one that such a
                    ProcessGroup registers for C++ code
    destruction     shuts down the groups that the script destroys, which PyTorch does itself from 2.7 on
    splitting       makes a group from some ranks of another group
    next_membership gives the default group other ranks, and what was made of it
    group_rounds    the default group of an elastic job, which has other ranks in each round
    reconfigure     a default group whose members the script chooses
    operations      each operation of c10d as a collective of the core: reductions, movements; sparse has the sum of sparse
                    tensors
    arguments       the forms and names of the operations' arguments
    submission      submits tensors
    flat_tensors    how tensors are passed to the core, and results to the caller's tensors
    work, futures   the return values of calls
    point_to_point  send and recv, which involve only two ranks

Calls have no names. A group counts all calls together, so ranks that call different operations get an error at once.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "horovod"


def register() -> None:
    """Give PyTorch the name of the back end, if this PyTorch has ``torch.distributed`` and no entry point has done so."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, backend_options: Any = None) -> Any:
    from horovod.torch.distributed.making import make  # a script that makes no group need not import it

    return make(options, backend_options)
