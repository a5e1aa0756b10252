"""Ranks that make different numbers of steps are told at the end of their scripts, in elastic jobs they are not."""

from __future__ import annotations

import pytest

from launcher.harness import Launcher

pytest.importorskip("torch")

SCRIPT = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
if hvd.rank() == 1:
    with optimizer.skip_synchronize():
        optimizer.step()
"""
"""Ranks of an elastic job may leave a round at different steps, so there it is no mistake."""


@pytest.mark.parametrize("elastic", [False, True])
def test_a_rank_with_one_more_step_is_reported_unless_the_job_is_elastic(launcher: Launcher, elastic: bool) -> None:
    (launcher.folder / "train.py").write_text(SCRIPT)
    ranks = ("-H", "localhost:2", "--min-np", "2") if elastic else ("-np", "2")
    done = launcher.run(*ranks, "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("different numbers of steps of the optimizer made at ") == (0 if elastic else 1), (
        done.stderr
    )
