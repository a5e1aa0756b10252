"""MXNet's loops, each against one process, on two ranks and on three."""

from __future__ import annotations

from typing import Any

import pytest

from loops import mxnet_gluon
from loops.harness import Loop, objection
from part import ALL


def cases() -> list[Any]:
    """All cases, or a part: every loop on one number of ranks."""
    found = []
    for number, loop in enumerate(mxnet_gluon.TABLE):
        for size in loop.sizes if ALL else [loop.sizes[number % len(loop.sizes)]]:
            check = "error" if (number + size) % 2 else "warn"
            found.append(pytest.param(loop, size, check, id=f"{loop.name}-{size}-{check}"))
    return found


@pytest.mark.parametrize(("loop", "size", "check"), cases())
def test_a_loop_trains_as_in_one_process_or_is_refused_by_name(
    job: Any, loop: Loop[Any], size: int, check: str
) -> None:
    from loops.mxnet_side import both_sides

    outcomes = job(size, both_sides, loop.train, env={"HOROVOD_CHECK": check})
    expected = loop.under(check)
    assert not (text := objection(expected, outcomes[0][0], [each for _, each in outcomes])), text
