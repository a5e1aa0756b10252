"""Ranks train, and one of them is slow: rank 0 says which, in which phase, and where the others wait."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

import horovod.torch as hvd
from time_limits import SOON

DEADLINE_SECONDS = SOON


class Slept(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose samples take time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(4)


class SleepsInForward(torch.nn.Linear):
    seconds = 0.0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(given)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def train(slow: int, phase: str, optimizer: bool = True) -> list[str]:
    """Train until rank 0 has named a rank; what it has logged."""
    lines = Lines()
    logging.getLogger("horovod.core").addHandler(lines)
    mine = phase if hvd.rank() == slow else ""
    model = SleepsInForward(4, 4)
    model.seconds = 0.02 if mine == "forward" else 0.001
    wrapped: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer:
        wrapped = hvd.DistributedOptimizer(wrapped, model.named_parameters())
    loader = torch.utils.data.DataLoader(Slept(0.02 if mine == "data" else 0.001), batch_size=1)
    given_up = time.monotonic() + DEADLINE_SECONDS
    for batch in loader:
        wrapped.zero_grad()
        model(batch).sum().backward()
        if not optimizer:
            hvd.allreduce(torch.ones(3))
        wrapped.step()
        over = bool(lines.kept) or time.monotonic() > given_up
        if hvd.broadcast_object(over, 0, name="over"):
            break
    logging.getLogger("horovod.core").removeHandler(lines)
    return lines.kept


def check(job: Any, size: int, slow: int, phase: str, words: str, optimizer: bool = True) -> None:
    said = job(size, train, slow, phase, optimizer)
    assert not any(said[1:])
    (line,) = said[0]
    assert line.startswith(f"rank {slow} on host ")
    assert f" holds up the other ranks in {words}: it takes " in line


def test_a_rank_that_is_slow_in_its_data_loading(job: Any) -> None:
    check(job, 3, 1, "data", "data loading")


def test_a_rank_that_is_slow_in_its_forward(job: Any) -> None:
    check(job, 2, 0, "forward", "forward")


def test_a_slow_rank_without_an_optimizer(job: Any) -> None:
    check(job, 2, 1, "forward", "its own work", optimizer=False)
