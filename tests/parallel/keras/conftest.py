"""What the tests of Keras share: one pool of ranks for each backend, since Keras has its backend for life."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jobs import Job, make_job
from keras_ranks import POOL, env_of
from ranks import RankPool


@pytest.fixture(scope="session", params=["jax", "torch", "tensorflow"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each of Keras's backends in turn; tests are ordered so that each has its turn once."""
    return str(request.param)


@pytest.fixture
def job(ranks: Callable[..., RankPool], backend: str) -> Job:
    """``job(size, function, *args)`` with ``horovod.keras`` on one backend; see :func:`jobs.make_job`."""
    return make_job(lambda size: ranks(POOL, env_of(backend), "keras"), "horovod.keras")
