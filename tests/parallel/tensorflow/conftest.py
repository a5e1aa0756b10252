"""What the tests of the TensorFlow binding share: one pool of ranks, which import TensorFlow once and use one thread each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jobs import Job, make_job
from ranks import RankPool

pytest.importorskip("tensorflow")

POOL = 3
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    """``job(size, function, *args)``; see :func:`jobs.make_job`. The first of a pool's three ranks are the job."""
    return make_job(lambda size: ranks(POOL, QUIET, "tensorflow"), "horovod.tensorflow")
