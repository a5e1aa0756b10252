"""Gloo's collectives on bytes, by ranks inside this one process."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from engines import group_of
from horovod.comm.base import Aborted
from horovod.comm.reduction import ReduceOp
from torch_versions import needs_gloo

gloo = pytest.importorskip("horovod.comm.gloo.collectives")  # imports PyTorch
pytestmark = needs_gloo


@pytest.mark.parametrize("call", ["allreduce", "broadcast"])
def test_nothing_is_started_after_an_abort(call: str) -> None:
    """A peer that receives a part of it before the connections end would wait for the rest for ever."""
    with group_of("gloo", 2) as (first, _):
        array = np.ones(1_000_000, np.float32)
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: first.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0),
            "broadcast": lambda: first.broadcast([array], 0),
        }
        first.abort()
        with pytest.raises(Aborted):
            calls[call]()
        assert first._collectives._number == 0


def test_an_operation_that_never_ends_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_SHUT_DOWN_SECONDS", 0.1)
    monkeypatch.setattr(gloo, "_left", [])
    work = mock.Mock(**{"is_completed.return_value": False, "wait.side_effect": RuntimeError("its slice is over")})
    with group_of("gloo", 2) as (first, _):
        first.abort()
        collectives = first._collectives
        with pytest.raises(Aborted):
            collectives.wait(collectives._start(work))
        waits = work.wait.call_count
    assert waits and work.wait.call_count == waits  # closing it has not waited again
