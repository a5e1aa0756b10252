"""Makes a group when PyTorch asks for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from horovod._base.config import goes_on
from horovod.torch.distributed import (
    c10d_backend,
    group_rounds,  # noqa: F401  elastic training finds it in sys.modules
    membership,
    reconfigure,
)
from horovod.torch.distributed.base import NAME
from horovod.torch.distributed.c10d_backend import HorovodBackend
from horovod.torch.distributed.ddp_reducer import install
from horovod.torch.distributed.destruction import watch_destruction
from horovod.torch.distributed.process_group import HorovodProcessGroup
from horovod.torch.distributed.submission import Submitter


def make(options: Any, backend_options: Any = None) -> HorovodProcessGroup | HorovodBackend:
    """Make a group of all ranks, or of the ranks that the options list. Every member must call it.

    Args:
        options: PyTorch's ``_DistributedBackendOptions``.
        backend_options: what the script has passed as ``pg_options``; only ``enable_reconfigure`` is used.

    Raises:
        ValueError: the caller asks for several back ends, and this PyTorch would use only this one; or for a group with
            changing members that cannot be.
        ValueError, TimeoutError, RuntimeError: the ranks do not find each other, or contradict each other.
    """
    watch_destruction()
    wanted = _wanted()
    others = set(wanted.values()) - {NAME}
    if others and not c10d_backend.AVAILABLE:
        shown = ",".join(f"{device}:{name}" for device, name in wanted.items())
        raise ValueError(
            f'backend="{shown}": in this version of PyTorch a back end in Python serves all devices of a group, so "{NAME}" '
            f'cannot be one of several. Use backend="{NAME}", which takes tensors on GPUs as well, or PyTorch 2.15 or newer.'
        )
    one_of_several = c10d_backend.AVAILABLE and (bool(others) or not wanted)
    store, rank, size = options.store, options.group_rank, options.group_size
    asked = (options, backend_options)  # PyTorch passes it from 2.14 on
    reconfigurable = any(getattr(each, "enable_reconfigure", False) for each in asked)
    if goes_on(os.environ):
        return _of_survivors(options, several=one_of_several, reconfigurable=reconfigurable)
    if reconfigurable:
        return _of_scripted_members(options, one_of_several)
    ranks: Sequence[int] = options.global_ranks_in_group
    if ranks:
        found = membership.of_some_ranks(store, rank, size, ranks, options.timeout, f"ranks {list(ranks)}")
    else:
        found = membership.of_all_ranks(store, rank, size, options.timeout)
    submitter = Submitter(found, options.timeout.total_seconds(), names_callbacks=not one_of_several)
    if one_of_several:
        return HorovodBackend(options, submitter)
    install()
    return HorovodProcessGroup(options, submitter)


def _of_scripted_members(options: Any, one_of_several: bool) -> HorovodProcessGroup:
    if one_of_several or options.global_ranks_in_group:
        raise ValueError(
            f'enable_reconfigure=True: only the default group with backend="{NAME}" alone may change its members.'
        )
    reconfigure.check_possible()
    store, seconds = options.store, options.timeout.total_seconds()
    unformed = reconfigure.unformed(store, options.group_rank, options.group_size)
    install()
    group = HorovodProcessGroup(options, Submitter(unformed, seconds))
    group.change_members_by(reconfigure.ScriptedMembers(group, store, options.timeout))
    return group


def _of_survivors(options: Any, several: bool, reconfigurable: bool) -> HorovodProcessGroup:
    """The group of all ranks of a job that goes on after a loss.

    Raises:
        NotImplementedError: another group is asked for.
    """
    from horovod.torch.distributed.on_loss.continuing_group import ContinuingGroup, refuse_groups  # few jobs need it
    from horovod.torch.distributed.on_loss.continuing_submission import ContinuingSubmitter
    from horovod.torch.distributed.on_loss.refusals import text

    if options.global_ranks_in_group:
        refuse_groups()
    if several:
        raise NotImplementedError(text("a group of several back ends"))
    if reconfigurable:
        raise NotImplementedError(text("enable_reconfigure=True"))
    limit = options.timeout
    found = membership.of_all_ranks(options.store, options.group_rank, options.group_size, limit)
    install()
    return ContinuingGroup(options, ContinuingSubmitter(found, limit.total_seconds(), limit))


def _wanted() -> dict[str, str]:
    """By device, the back ends that the caller wants for the group; empty if unknown. PyTorch does not pass them, so they are
    read from its function on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return dict(config.get_device_backend_map()) if config is not None else {}
