"""Which processes make up a job, from the argument of ``init(comm=...)``; communicators are in tests/parallel."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from horovod._base.process_identity import ProcessIdentity
from horovod.core.lifecycle.world import choose, find_local_ranks, is_communicator


def launched(rank: int = 1, size: int = 4) -> ProcessIdentity:
    return ProcessIdentity(rank, size, rank, size, 0, 1, "host", "horovodrun", "job")


@pytest.mark.parametrize("comm", [None, [], (), range(0), [0, 1, 2, 3], range(4), iter([])])
def test_all_that_were_launched(comm: Any) -> None:
    world = choose(comm, launched())
    assert world.identity == world.launched == launched()
    assert world.is_launched_job
    assert world.listed == ()


@pytest.mark.parametrize(
    ("comm", "rank"), [([1], 0), ([0, 1], 1), ([1, 0], 0), ([3, 2, 1], 2), (range(1, 3), 0), (np.array([3, 1]), 1)]
)
def test_ranks_are_numbered_in_the_order_of_the_list(comm: Any, rank: int) -> None:
    world = choose(comm, launched())
    assert (world.identity.rank, world.identity.size) == (rank, len(comm))
    assert world.launched == launched()
    assert world.listed == tuple(comm)
    assert not world.is_launched_job


def test_all_ranks_in_another_order_are_a_job_of_their_own() -> None:
    assert choose([1, 0, 2, 3], launched()).identity.rank == 0


@pytest.mark.parametrize(
    ("comm", "text"),
    [
        ([1, 2, 1], "rank 1 is listed more than once"),
        ([1, 4], "rank 4 is not one of the 4 that horovodrun launched"),
        ([-1, 1], "rank -1 is not one of the 4"),
        ([0, 2], "this process is rank 1 of the launched job and not among them"),
    ],
)
def test_a_list_that_cannot_be(comm: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=r"^Horovod initialization failed") as caught:
        choose(comm, launched())
    assert text in str(caught.value)
    assert str(comm) in str(caught.value)


@pytest.mark.parametrize("comm", [5, 1.5, object(), "01", ["a"], [1.0], [True], [None]])
def test_what_is_neither_ranks_nor_a_communicator(comm: Any) -> None:
    assert not is_communicator(comm)
    with pytest.raises(ValueError, match="Invalid type of argument comm"):
        choose(comm, launched())


def test_local_and_cross_numbers_follow_from_the_hosts() -> None:
    hosts = ["a", "b", "a", "c", "b", "b"]
    found = []
    for rank in range(6):
        identity = find_local_ranks(ProcessIdentity(rank, 6, 9, 9, 9, 9, "x", "y", "z"), hosts)
        assert astuple(identity)[:2] == (rank, 6)
        found.append((identity.local_rank, identity.local_size, identity.cross_rank, identity.cross_size))
    assert found == [(0, 2, 0, 3), (0, 3, 1, 3), (1, 2, 0, 2), (0, 1, 2, 3), (1, 3, 1, 2), (2, 3, 0, 1)]
