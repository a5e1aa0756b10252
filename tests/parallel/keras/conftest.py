"""What the tests of Keras share: one pool of ranks for each backend, since Keras has its backend for life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import Job, make_job
from keras_ranks import POOL, env_of
from part import backends_of
from ranks import RankPool

BACKENDS = ["jax", "torch", "tensorflow"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave back ends out of each test, if only a part of the tests runs."""
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    if call is None or "backend" not in call.params or Path(__file__).parent not in item.path.parents:
        return False
    return call.params["backend"] not in backends_of(item.originalname)  # type: ignore[attr-defined]  # a function's, as it has a call


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each of Keras's backends in turn; tests are ordered so that each has its turn once."""
    return str(request.param)


@pytest.fixture
def job(ranks: Callable[..., RankPool], backend: str) -> Job:
    """``job(size, function, *args)`` with ``horovod.keras`` on one backend; see :func:`jobs.make_job`."""
    return make_job(lambda size: ranks(POOL, env_of(backend), "keras"), "horovod.keras")
