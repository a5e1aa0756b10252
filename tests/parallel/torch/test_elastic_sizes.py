"""What was made in one round works in the next with another number of ranks: optimizers, buckets, SyncBatchNorm."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from ranks import RankPool
from scripted_launcher import ScriptedLauncher

ROUNDS = [[0, 1, 2], [2, 1], [1, 2, 0]]
"""Fewer ranks, numbered anew; then again as many, one of which has taken no part for a round."""


@pytest.mark.parametrize("bucket_bytes", [None, "64"])
def test_optimizers_and_layers_live_on_over_sizes(
    ranks: Callable[..., RankPool], tmp_path: Path, bucket_bytes: str | None
) -> None:
    """Two optimizers of the same kind, several buckets: every round's gradients and statistics are those of its ranks."""

    def work(bucket_bytes: str | None) -> None:
        import os

        if bucket_bytes:
            os.environ["HOROVOD_BUCKET_BYTES"] = bucket_bytes
        try:
            run()
        finally:
            os.environ.pop("HOROVOD_BUCKET_BYTES", None)

    def run() -> None:
        with ScriptedLauncher(ROUNDS) as launcher:
            hvd.init()
            torch.manual_seed(0)
            layer = hvd.SyncBatchNorm(2, momentum=None)
            models = [torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)).double() for _ in range(2)]
            optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
            for number, members in enumerate(ROUNDS):
                if launcher.process in members:
                    while number and not all(
                        (tmp_path / f"{number - 1}.{each}").exists() for each in ROUNDS[number - 1]
                    ):
                        time.sleep(0.01)  # the last round is over on all its ranks
                    if not hvd.is_initialized():
                        hvd.init()
                    check(launcher.process, members, models, optimizers, layer)
                    hvd.shutdown()
                    (tmp_path / f"{number}.{launcher.process}").touch()
                if launcher.number + 1 < len(ROUNDS):
                    try:
                        launcher.next(None)
                    except SystemExit:
                        pass  # this round is the others'

    def check(process: int, members: list[int], models: Any, optimizers: Any, layer: Any) -> None:
        assert hvd.size() == len(members) and hvd.rank() == members.index(process)
        mean = sum(each + 1 for each in members) / len(members)
        order = (0, 1) if hvd.rank() else (1, 0)
        for _ in range(2):
            before = [[p.detach().clone() for p in model.parameters()] for model in models]
            for optimizer in optimizers:
                optimizer.zero_grad()
            for which in order:
                sum((p * (process + 1) * (which + 1)).sum() for p in models[which].parameters()).backward()
            for which in range(2):
                optimizers[which].step()
                for parameter, old in zip(models[which].parameters(), before[which], strict=True):
                    torch.testing.assert_close(parameter, old - mean * (which + 1))
        x = torch.arange(2.0).repeat(3, 1) + process
        layer.reset_running_stats()
        layer(x)
        average = sum(members) / len(members)
        torch.testing.assert_close(layer.running_mean, torch.tensor([average, average + 1]))

    ranks(3, framework="torch").run(work, bucket_bytes)
