"""PyTorch's loops, each against one process: in one bucket and in many, on two ranks and on three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs import make_job
from loops import (
    pytorch_apart,
    pytorch_changes,
    pytorch_inside,
    pytorch_parameters,
    pytorch_second,
    pytorch_seven,
    pytorch_unused,
    pytorch_windows,
)
from loops.harness import Loop, objection
from loops.pytorch import both_sides
from part import ALL
from ranks import RankPool

MODULES = (
    pytorch_seven,
    pytorch_unused,
    pytorch_changes,
    pytorch_windows,
    pytorch_parameters,
    pytorch_second,
    pytorch_inside,
    pytorch_apart,
)
TABLES = [each.TABLE for each in MODULES]
WAYS = [(2, ""), (2, "1"), (3, ""), (3, "1")]
"""Numbers of ranks, and HOROVOD_BUCKET_BYTES. With buckets of one byte, HOROVOD_CHECK is "error"."""
CROSSED = [[WAYS[0], WAYS[3]], [WAYS[1], WAYS[2]]]
"""Two of them each, in which each number of ranks and each size of buckets is once."""


def cases() -> list[Any]:
    """All cases, or a part: every loop in one bucket and in many, and on each number of ranks."""
    found = []
    for table in TABLES:
        for number, loop in enumerate(table):
            for size, bucket_bytes in WAYS if ALL or len(loop.sizes) == 1 else CROSSED[number % 2]:
                if size in loop.sizes and (ALL or loop.part):
                    marks = [pytest.mark.xfail(strict=True, reason=loop.known)] if loop.known else []
                    case = f"{loop.name}-{size}-{'many buckets' if bucket_bytes else 'one bucket'}"
                    found.append(
                        pytest.param(table.name, loop, size, bucket_bytes, id=f"{table.name}: {case}", marks=marks)
                    )
    return found


@pytest.mark.parametrize(("table", "loop", "size", "bucket_bytes"), cases())
def test_a_loop_trains_as_in_one_process_or_is_refused_by_name(
    ranks: Callable[..., RankPool], table: str, loop: Loop[Any], size: int, bucket_bytes: str
) -> None:
    job = make_job(lambda size: ranks(size, framework="torch"), "horovod.torch")
    check = "error" if bucket_bytes and not loop.warns else ""
    env = {name: value for name, value in (("HOROVOD_BUCKET_BYTES", bucket_bytes), ("HOROVOD_CHECK", check)) if value}
    outcomes = job(size, both_sides, loop.train, env=env)
    alone = outcomes[0][0]
    expected = loop.under(check)
    assert not (text := objection(expected, alone, [each for _, each in outcomes])), text
