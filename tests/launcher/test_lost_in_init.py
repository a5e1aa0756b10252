"""A rank that is killed or stopped at any moment of ``init()``: the launcher's last words name that rank.

``HOROVOD_TEST_INIT_LOSSES=60`` tries so many moments; ``python tests/lost_in_init.py`` repeats one.
"""

from __future__ import annotations

import os
import random

import pytest

from launcher.harness import Launcher
from lost_in_init import Loss, calls_of_init, lost, named
from part import draws

JOBS = int(os.environ.get("HOROVOD_TEST_INIT_LOSSES", draws(12)))


@pytest.mark.timeout(60 * JOBS)
def test_the_launcher_names_the_rank_that_is_lost_in_init(launcher: Launcher) -> None:
    most = calls_of_init(launcher)
    for seed in random.Random().sample(range(1 << 30), JOBS):
        loss = Loss.of(seed, most)
        errors = loss.run(launcher)
        assert named(errors) == [loss.rank] and lost(errors) <= {loss.rank}, f"--seed {seed}: {loss}: {errors}"
        launcher.await_nothing()
