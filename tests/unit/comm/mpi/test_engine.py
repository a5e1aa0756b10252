"""The engine that moves data over MPI."""

from __future__ import annotations

from typing import Any, cast

import pytest

from horovod.comm.mpi.engine import MpiCommunicator


class Exchange:
    """No message is sent."""


@pytest.mark.parametrize("one_host", [True, False])
def test_calls_that_may_not_return_after_a_loss_are_left_to_the_worker_thread(one_host: bool) -> None:
    communicator = MpiCommunicator(0, 2, cast("Any", Exchange()), one_host=one_host)
    assert communicator.any_thread is one_host
    assert communicator.compresses is not one_host
