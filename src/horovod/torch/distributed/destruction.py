"""Shuts down the groups that ``destroy_process_group()`` destroys. PyTorch does so itself from 2.7 on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from horovod.torch.distributed.base import BackendGroup

_c10d: Any = dist.distributed_c10d


class WatchedGroups(dict[Any, Any]):
    """PyTorch's table of groups, from which it removes the groups that it destroys. A script may hold the function itself."""

    def __delitem__(self, group: Any) -> None:
        _shut_down(group)
        super().__delitem__(group)

    def clear(self) -> None:
        for group in reversed(self):  # the default group, which is the first, last
            _shut_down(group)
        super().clear()


def _shut_down(group: Any) -> None:
    if isinstance(group, BackendGroup):
        group.shutdown()


def watch_destruction() -> None:
    """Shut groups down when they are destroyed. Call it before a group is made."""
    if torch.__version__ < "2.7" and not isinstance(_c10d._pg_map, WatchedGroups):
        _c10d._pg_map = WatchedGroups(_c10d._pg_map)
