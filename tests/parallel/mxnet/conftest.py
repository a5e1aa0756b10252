"""What the tests of the MXNet binding share: one pool of ranks, which import MXNet once and use one thread each.

MXNet has an environment of its own (``make test`` makes it). Elsewhere these tests are not collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from jobs import Job, make_job
from ranks import RankPool

POOL = 3

if importlib.util.find_spec("mxnet") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    """``job(size, function, *args)``; see :func:`jobs.make_job`. The first of a pool's three ranks are the job."""
    return make_job(lambda size: ranks(POOL, framework="mxnet"), "horovod.mxnet")
