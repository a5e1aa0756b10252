"""PyTorch's loops, each against one process: in one bucket and in many, on two ranks and on three."""

from __future__ import annotations

import os
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
ALL = os.environ.get("HOROVOD_TEST_ALL_LOOPS") == "1"
WAYS = [(2, ""), (2, "1"), (3, ""), (3, "1")]
"""Numbers of ranks, and HOROVOD_BUCKET_BYTES. With buckets of one byte, HOROVOD_CHECK is "error"."""


def cases() -> list[Any]:
    found = []
    for table in TABLES:
        for loop in table:
            for size, bucket_bytes in WAYS:
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
