"""What the tests of the PyTorch binding share: a job of real ranks for the length of one function."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jobs import Job, make_job
from ranks import RankPool


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    """``job(size, function, *args)``; see :func:`jobs.make_job`."""
    return make_job(lambda size: ranks(size, framework="torch"), "horovod.torch")
