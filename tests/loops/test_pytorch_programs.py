"""Random programs train on ranks as in one process, and no rank is told that it has come apart from the others.

HOROVOD_TEST_PROGRAMS=10000 runs that many; a program that fails is named by its seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from jobs import make_job
from part import draws
from ranks import RankPool

COUNT = int(os.environ.get("HOROVOD_TEST_PROGRAMS", draws(100)))
AT_ONCE = 50


def train(first: int, count: int, processors: int = 1) -> list[tuple[int, float]]:
    """Run programs on this rank and alone; the seeds and differences of those that differ.

    Args:
        processors: with two kinds of them, rank 1 rounds otherwise than the others.
    """
    import warnings
    from contextlib import nullcontext

    import torch

    import horovod.torch as hvd
    from loops.pytorch import TorchSide, in_float64, rounding_otherwise
    from loops.pytorch_programs import draw, run

    wrong = []
    here = rounding_otherwise() if processors > 1 and hvd.rank() == 1 else nullcontext()
    with in_float64(), warnings.catch_warnings(), here:
        warnings.simplefilter("error")
        for seed in range(first, first + count):
            program = draw(seed, hvd.size())
            alone = [each.detach().clone() for each in run(program, TorchSide(0, hvd.size(), False))]
            try:
                ranked = [each.detach().clone() for each in run(program, TorchSide(hvd.rank(), hvd.size(), True))]
            except Exception as error:
                raise AssertionError(f"program {seed}: {program}") from error
            difference = max(float((a - b).abs().max()) for a, b in zip(alone, ranked, strict=True))
            if not difference < 1e-9:
                wrong.append((seed, difference))
            torch.manual_seed(0)
    return wrong


@pytest.mark.parametrize(("size", "processors"), [(2, 1), (3, 1), (2, 2)])
def test_random_programs_train_as_in_one_process(ranks: Callable[..., RankPool], size: int, processors: int) -> None:
    job = make_job(lambda size: ranks(size, framework="torch"), "horovod.torch")
    for first in range(0, COUNT // 2, AT_ONCE):
        seeds = first + size * 100_000, min(AT_ONCE, COUNT // 2 - first)
        found = job(size, train, *seeds, processors, timeout=200, env={"HOROVOD_CHECK": "error"})
        assert not any(found), f"programs whose parameters differ from one process: {found}"
