"""A default process group of torch.distributed on the ranks of a pool, for the length of one function."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ranks import Call, RankPool
from time_limits import SOON


def start_in_group(
    pool: RankPool,
    function: Callable[..., Any],
    *args: Any,
    by_store: bool = False,
    timeout: float = SOON,
    hosts: str = "",
) -> Call:
    """Have ``function(*args)`` run on every rank of the pool inside of a group of all of them.

    Args:
        by_store: the ranks know of one another through the group's store alone, and no launcher of ours is seen.
        timeout: of the group.
        hosts: a letter for each rank, by which those on one host know each other; "": all are on one.
    """
    folder = Path(tempfile.mkdtemp(prefix="horovod-store-"))
    path = str(folder / "store")

    @functools.wraps(function)  # so that it travels together with the module of the test
    def call(*args: Any) -> Any:
        return _call(function, args, path, by_store, timeout, hosts)

    started = pool.start(call, *args)
    # Not by a rank: another one may still wait for something in the store.
    weakref.finalize(started, shutil.rmtree, folder, ignore_errors=True)
    return started


def run_in_group(
    pool: RankPool,
    function: Callable[..., Any],
    *args: Any,
    by_store: bool = False,
    timeout: float = SOON,
    hosts: str = "",
    dies: Collection[int] = (),
) -> list[Any]:
    """:func:`start_in_group`, and wait; what each rank returned."""
    return start_in_group(pool, function, *args, by_store=by_store, timeout=timeout, hosts=hosts).results(120.0, dies)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], path: str, by_store: bool, timeout: float, hosts: str
) -> Any:
    """Runs on a rank."""
    import os
    from datetime import timedelta

    import torch.distributed as dist

    import horovod.torch  # noqa: F401  it registers the back end
    from horovod._base import config

    before = dict(os.environ)
    rank, size = int(os.environ[config.RANK]), int(os.environ[config.SIZE])
    if hosts:
        os.environ[config.HOSTNAME] = hosts[rank]
    if by_store:
        for name in [name for name in os.environ if "HOROVOD" in name and "OPERATIONS" not in name]:
            del os.environ[name]
    try:
        store = dist.FileStore(path, size)
        dist.init_process_group("horovod", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
