"""Gives PyTorch the name ``horovod`` of the back end, and replaces another back end by it if the user asks for that.

PyTorch calls :func:`register` through an entry point: 2.15 when a script first asks for the back end
(``torch.distributed.backends``), 2.5 and newer at the end of ``import torch`` (``torch.backends``). So this module imports
little, and nothing of ``horovod.torch`` before a group is made: an error here would make ``import torch`` fail.
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from horovod._base.config import ELASTIC_PROCESS, TORCH_BACKEND

NAME = "horovod"
_REPLACED = "gloo"


def register() -> None:
    """Register the back end, if this PyTorch has ``torch.distributed``; once. The entry points call it."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    if os.environ.get(TORCH_BACKEND, "").strip().lower() == NAME:
        _stand_in()
    if os.environ.get(ELASTIC_PROCESS):
        meet_by_launcher()


def _make(options: Any, backend_options: Any = None) -> Any:
    from horovod.torch.distributed.making import make

    return make(options, backend_options)


def _stand_in() -> None:
    """Have ``init_process_group("gloo")`` make the default group with this back end.

    ``monitored_barrier()``, which PyTorch before 2.15 offers on Gloo only, works on its groups, too.
    """
    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    init, barrier = module.init_process_group, module.monitored_barrier

    def init_process_group(backend: Any = None, *arguments: Any, **options: Any) -> Any:
        if backend is not None and str(backend).lower() in (_REPLACED, f"cpu:{_REPLACED}"):
            _say_so()
            backend = NAME
        return init(backend, *arguments, **options)

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if module._rank_not_in_group(group) or module.get_backend(group) != NAME:
            return barrier(group, timeout, wait_all_ranks)
        return (group or module._get_default_group()).monitored_barrier(timeout, wait_all_ranks)

    for replacement, original in ((init_process_group, init), (monitored_barrier, barrier)):
        functools.update_wrapper(replacement, original)
        for place in (module, dist):
            setattr(place, replacement.__name__, replacement)


def meet_by_launcher() -> None:
    """Have ``init_process_group()`` of an elastic job get rank, number of ranks and store from the launcher, unless the user
    has given the address of a store. Call it once: :func:`register` has done so if the process was started as a rank.

    An address that appears later was made up in this process, as Lightning does, and no other process knows it.
    """
    given = os.environ.get("MASTER_ADDR")
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    by_environment = handlers["env"]

    def by_launcher(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Any:
        if given:
            return by_environment(url, timeout=timeout, **options)
        from horovod.torch.distributed import group_rounds

        return group_rounds.rendezvous(timeout)

    handlers["env"] = by_launcher


def _say_so() -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f'horovod: init_process_group("{_REPLACED}") uses the back end "{NAME}" ({TORCH_BACKEND}={NAME})',
            file=sys.stderr,
            flush=True,
        )
