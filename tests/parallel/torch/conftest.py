"""What the tests of the PyTorch binding share: a job of real ranks for the length of one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ranks import RankPool

Job = Callable[..., list[Any]]


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    """``job(size, function, *args)``: ``init()``, the function, ``shutdown()`` on every rank; the results, by rank.

    Keywords: ``env``, settings in force from ``init()`` to ``shutdown()``; ``sets``, ranks of static process sets, which
    the function gets as its first argument; ``timeout``. A rank that raises leaves the job, so that no other waits for it.
    """

    def run(
        size: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        sets: list[list[int]] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        @functools.wraps(function)  # so that it travels together with the module of the test
        def generation(*args: Any) -> Any:
            import os

            import horovod.torch as hvd

            os.environ.update(env or {})
            made = None if sets is None else [hvd.ProcessSet(members) for members in sets]
            try:
                hvd.init(process_sets=made)
                return function(*args) if made is None else function(made, *args)
            finally:
                hvd.shutdown()
                for name in env or {}:
                    del os.environ[name]

        return ranks(size, framework="torch").run(generation, *args, timeout=timeout)

    return run
