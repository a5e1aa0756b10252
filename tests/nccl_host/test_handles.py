"""The calls of :class:`CommHandle` on NCCL's own host code: what it returns when, what it refuses, and how it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod.comm.base import Aborted, DeviceFailure
from horovod.comm.nccl import handle as module
from horovod.comm.nccl.handle import SUMS, CommHandle
from host_code import SIZE, Rank
from ranks import RankPool
from time_limits import SOON


def test_every_operation_is_queued_and_ends_in_good_order(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> bool:
        rank = Rank(*arguments)
        with rank.communicator() as communicator:
            before = rank.launches()
            rank.every_operation(communicator, SIZE)
            rank.allreduce(communicator, 161)
            rank.allreduce(communicator, 0)
            assert communicator.failure() is None
            return rank.launches() > before

    assert pool.run(check, nccl, str(tmp_path)) == [True] * SIZE


def test_factors_are_given_back_when_there_are_many(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        with rank.communicator() as communicator:
            for turn in range(SUMS + 8):
                operation = communicator.multiplied_sum(np.dtype(np.float32), 1 / (turn + 3))
                rank.allreduce(communicator, operation=operation)
            assert communicator.failure() is None

    pool.run(check, nccl, str(tmp_path))


def test_a_call_that_is_refused_is_an_error_that_says_why(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        communicator = rank.create()
        with pytest.raises(DeviceFailure, match=r"ncclAllReduce: NCCL says 'invalid argument.*invalid type 99"):
            rank.allreduce(communicator, kind=99)
        assert "invalid type 99" in str(communicator.failure())
        communicator.abort()
        communicator.close()

    pool.run(check, nccl, str(tmp_path))


def test_parts_are_made_used_and_outlive_the_whole(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    """NCCL returns from ``ncclCommSplit`` before it splits, on ranks without a part, too."""

    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        whole = rank.create()
        for first in range(SIZE):  # every pair of ranks
            members = [first, (first + 1) % SIZE]
            index = members.index(rank.rank) if rank.rank in members else None
            part = whole.split(None if index is None else 0, index or 0, time.monotonic() + SOON)
            rank.allreduce(whole)  # refused if the split were still in progress
            assert (part is None) == (index is None)
            if part is not None:
                rank.every_operation(part, 2)
                part.close()
        last = whole.split(0, SIZE - 1 - rank.rank, time.monotonic() + SOON)
        whole.close()
        assert last is not None
        rank.every_operation(last, SIZE)
        last.close()

    pool.run(check, nccl, str(tmp_path))


def test_nothing_is_written_after_a_split(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    """By the time that the memory for the address may be freed, NCCL has written there for the last time."""

    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        real, places = rank.nccl.functions.ncclCommSplit, list[Any]()

        def split(*given: Any) -> int:
            places.append(given[3]._obj)
            return int(real(*given))

        rank.nccl.functions.ncclCommSplit = split
        with rank.communicator() as whole:
            part = whole.split(0 if rank.rank < 2 else None, max(rank.rank, 0), time.monotonic() + SOON)
            places[0].value = 0xDEAD
            rank.meet("split")
            time.sleep(1)  # a late write comes within milliseconds
            assert places[0].value == 0xDEAD
            if part is not None:
                part.close()

    pool.run(check, nccl, str(tmp_path))


def test_a_rank_that_does_not_come_is_an_error_after_the_limit(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        if rank.rank == 1:
            return
        with pytest.raises(DeviceFailure, match=r"did not finish within the time limit: a rank did not make this call"):
            rank.create(seconds=2)

    pool.run(check, nccl, str(tmp_path))


def test_a_rank_that_does_not_come_to_a_split_leaves_no_part(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        whole = rank.create()
        rank.allreduce(whole)
        if rank.rank < 2:
            with pytest.raises(DeviceFailure, match="ncclCommSplit: NCCL did not finish within the time limit"):
                whole.split(0, rank.rank, time.monotonic() + 2)
        rank.meet("given up")
        whole.abort()
        whole.close()
        assert not module._written_by_nccl  # the abort has ended the split

    pool.run(check, nccl, str(tmp_path))


def test_two_ranks_on_one_device_are_refused_with_its_name(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments, device=0)
        with pytest.raises(DeviceFailure, match=r"Duplicate GPU detected : rank . and rank . both on CUDA device"):
            rank.create()

    pool.run(check, nccl, str(tmp_path))


def test_the_others_end_after_a_rank_has_died(pool: RankPool, nccl: str, tmp_path: Path) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        communicator = rank.create()
        rank.allreduce(communicator)
        rank.meet("connected")
        if rank.rank == 1:
            os._exit(7)
        rank.allreduce(communicator)
        communicator.abort()
        communicator.close()
        assert isinstance(communicator.failure(), Aborted)

    pool.run(check, nccl, str(tmp_path), dies=[1])


def while_connecting(rank: Rank) -> CommHandle | None:
    made: list[CommHandle] = []
    real = CommHandle._settle

    def settle(self: CommHandle, *arguments: Any) -> None:
        if not made:
            made.append(self)
            self.abort()
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommHandle, "_settle", settle)
        with pytest.raises(Aborted):
            rank.create()
    return None


def while_splitting(rank: Rank) -> CommHandle:
    communicator = rank.create()
    rank.allreduce(communicator)
    if rank.rank < 2:
        threading.Timer(0.3, communicator.abort).start()
        with pytest.raises(Aborted):
            communicator.split(0, rank.rank, time.monotonic() + SOON)  # rank 2 does not come
    return communicator


def after_collectives(rank: Rank) -> CommHandle:
    communicator = rank.create()
    rank.allreduce(communicator, 161)
    return communicator


def after_a_split(rank: Rank) -> CommHandle:
    communicator = rank.create()
    part = communicator.split(0, rank.rank, time.monotonic() + SOON)
    assert part is not None
    rank.allreduce(part)
    part.abort()
    part.close()
    rank.allreduce(communicator)  # the two share nothing
    return communicator


def after_the_end(rank: Rank) -> None:
    communicator = rank.create()
    rank.allreduce(communicator)
    communicator.close()
    communicator.abort()
    assert communicator.failure() is None


STATES: list[Callable[[Rank], CommHandle | None]] = [
    while_connecting,
    Rank.create,
    after_collectives,
    while_splitting,
    after_a_split,
    after_the_end,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__.replace("_", " "))
def test_an_abort_ends_a_communicator_in_every_state(
    pool: RankPool, nccl: str, tmp_path: Path, state: Callable[[Rank], CommHandle | None]
) -> None:
    def check(*arguments: str) -> None:
        rank = Rank(*arguments)
        communicator = state(rank)
        if communicator is not None:
            communicator.abort()
            communicator.abort()
            with pytest.raises(Aborted):
                rank.allreduce(communicator)
            communicator.close()
            assert isinstance(communicator.failure(), Aborted)

    pool.run(check, nccl, str(tmp_path))
    pool.run(again, nccl, str(tmp_path))


def again(*arguments: str) -> None:
    """The library serves on."""
    rank = Rank(*arguments)
    communicator = rank.create(name="again")
    rank.every_operation(communicator, SIZE)
    communicator.close()
