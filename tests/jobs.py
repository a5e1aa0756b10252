"""A job of real ranks for the length of one function, whatever its binding: what the tests of all bindings share."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod._base import config
from ranks import RankPool
from time_limits import SOON

Job = Callable[..., list[Any]]


def make_job(pool: Callable[[int], RankPool], binding: str) -> Job:
    """``job(size, function, *args)``: ``init()``, the function, ``shutdown()`` on every rank; the results, by rank.

    Keywords: ``hosts``, by rank the name of the host that it pretends to be on; ``env``, settings in force from ``init()``
    to ``shutdown()``; ``sets``, ranks of static process sets, which the function gets as its first argument; ``timeout`` and
    ``dies`` as for :meth:`ranks.Call.results`. A rank that raises leaves the job, so that no other waits for it.

    Args:
        pool: gives the pool for a size; where it has more ranks than that, the first of them are the job, and each of the
            others starts and ends one alone, since ranks must have counted the same generations.
        binding: the module with ``init`` and ``shutdown``.
    """

    def run(
        size: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] = (),
        sets: list[list[int]] | None = None,
        timeout: float = SOON,
        dies: Collection[int] = (),
    ) -> list[Any]:
        @functools.wraps(function)  # so that it travels together with the module of the test
        def generation(*args: Any) -> Any:
            hvd = importlib.import_module(binding)
            spare = int(os.environ[config.RANK]) >= size
            numbers = {config.SIZE: "1", config.LOCAL_SIZE: "1", config.RANK: "0", config.LOCAL_RANK: "0"}
            settings = numbers if spare else {config.SIZE: str(size), config.LOCAL_SIZE: str(size), **(env or {})}
            if hosts and not spare:
                settings[config.HOSTNAME] = hosts[int(os.environ[config.RANK])]
            before = {name: os.environ.get(name) for name in settings}
            os.environ.update(settings)
            made = None if sets is None else [hvd.ProcessSet(members) for members in sets]
            try:
                hvd.init(process_sets=None if spare else made)
                if spare:
                    return None
                return function(*args) if made is None else function(made, *args)
            finally:
                hvd.shutdown()
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value

        return pool(size).run(generation, *args, timeout=timeout, dies=dies)[:size]

    return run
