"""MXNet's loops, each against one process, on two ranks and on three."""

from __future__ import annotations

from typing import Any

import pytest

from loops import mxnet_gluon
from loops.harness import Loop, objection
from part import ALL


def cases() -> list[Any]:
    """All cases, or a part: every loop on one number of ranks."""
    return [
        pytest.param(loop, size, id=f"{loop.name}-{size}")
        for number, loop in enumerate(mxnet_gluon.TABLE)
        for size in (loop.sizes if ALL else [loop.sizes[number % len(loop.sizes)]])
    ]


@pytest.mark.parametrize(("loop", "size"), cases())
def test_a_loop_trains_as_in_one_process_or_is_refused_by_name(job: Any, loop: Loop[Any], size: int) -> None:
    from loops.mxnet_side import both_sides

    # Not with HOROVOD_CHECK=error, after which MXNet's engine raises in a later loop what was in flight.
    outcomes = job(size, both_sides, loop.train)
    assert not (text := objection(loop, outcomes[0][0], [each for _, each in outcomes])), text
