"""The three steps of a large allreduce, piece by piece, on one rank whose peers are played."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest

from horovod.comm.base import PeerFailure
from horovod.comm.hierarchical.communicator import HierarchicalCommunicator
from horovod.comm.hierarchical.rank_grid import RankGrid
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Vectors, arrays_of
from time_limits import SOON

SECONDS = SOON


class Inside(SingleCommunicator):
    """This rank alone, as if the others of its host contributed zeros and had all other shares."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.reduced_again = threading.Event()

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self.calls.append("reduce")
        arrays_of(outputs)[0][:] = arrays_of(inputs)[0][: counts[0][0]]
        if self.calls.count("reduce") == 2:
            self.reduced_again.set()

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        self.calls.append("gather")
        arrays_of(outputs)[0][: counts[0][0]] = arrays_of(inputs)[0]


class Across(SingleCommunicator):
    """Adds 1, as the other host does; the first piece arrives only when the second has been reduced."""

    def __init__(self, inside: Inside, fails: bool) -> None:
        super().__init__()
        self.inside = inside
        self.fails = fails

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        assert self.inside.reduced_again.wait(SECONDS), "the next piece waits for this one"
        if self.fails:
            raise PeerFailure(1, "it is gone")
        arrays_of(outputs)[0][:] += 1

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        arrays_of(outputs)[0][: counts[0][0]] = arrays_of(inputs)[0]


def engine(fails: bool = False) -> HierarchicalCommunicator:
    inside = Inside()
    across = Across(inside, fails)
    return HierarchicalCommunicator(RankGrid.of("aabb", 0), inside, across, SingleCommunicator(), piece_bytes=64)


def test_a_part_whose_calls_may_not_return_keeps_all_collectives_off_the_scripts_threads() -> None:
    inside = Inside()
    across = Across(inside, fails=False)
    for any_thread in (True, False):
        across.any_thread = any_thread
        grid = RankGrid.of("aabb", 0)
        with closing(HierarchicalCommunicator(grid, inside, across, SingleCommunicator(), piece_bytes=64)) as made:
            assert made.any_thread is any_thread


@pytest.mark.parametrize("lengths", [[40, 3, 0, 7], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 200, 0]])
def test_an_allgather_takes_constant_memory(lengths: list[int]) -> None:
    """Rank 0 sees its own; what the others bring is left as it is."""
    most = 0
    with closing(engine()) as made:
        source = np.arange(lengths[0], dtype=np.float32)
        made.allgather([source], [np.zeros(sum(lengths), np.float32)], [lengths])
        most = made._workspace.nbytes
    assert most <= 4 * (64 + 16)


def test_the_next_piece_is_reduced_while_one_travels() -> None:
    array = np.arange(
        40, dtype=np.float32
    )  # three pieces of 16 elements at most, of which this rank has the first half
    with closing(engine()) as made:
        made.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)
    mine = [*range(8), *range(16, 24), *range(32, 36)]
    assert array.tolist() == [number + (number in mine) for number in range(40)]


def test_a_failure_between_hosts_names_the_rank() -> None:
    array = np.ones(40, np.float32)
    with closing(engine(fails=True)) as made, pytest.raises(PeerFailure, match="it is gone") as failure:
        made.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)
    assert failure.value.rank == 2  # the second of this rank's column
