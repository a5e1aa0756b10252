"""What large tensors go through when ranks read one another's memory; each rank is a thread of this process.

That results are right is the business of ``tests/parallel/test_engines.py``, whose engine ``shm-direct`` is this one. Here are
batches that it would not meet there, and what happens where memory cannot be read.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import group_of, outcomes, run_ranks
from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace
from horovod.comm.shm import cross_memory
from horovod.comm.shm import direct_reads as direct
from horovod.comm.shm import large as large_module
from horovod.comm.shm.direct_reads import DirectCollectives, exchange_rank_infos, folded_bytes
from horovod.comm.shm.futex_words import PACKED, word_index
from horovod.comm.spans import spans_of
from part import draws
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="cross-memory attach needs Linux")

SIZE = 3


class Table:
    """An exchange among threads."""

    def __init__(self, size: int) -> None:
        self._rows: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int) -> Callable[[Array], list[Array]]:
        def exchanged(words: Array) -> list[Array]:
            self._barrier.wait(SOON)
            self._rows[rank] = words
            self._barrier.wait(SOON)
            return list(self._rows)

        return exchanged


def on_ranks(function: Callable[[int, Callable[[Array], list[Array]]], Any]) -> list[Any]:
    """Run ``function(rank, exchange)`` in one thread a rank."""
    table = Table(SIZE)
    found: list[Any] = [None] * SIZE

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank, table.exchange(rank))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@settings(max_examples=draws(40), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    dtype=st.sampled_from([np.dtype(np.float32), np.dtype(np.int64), np.dtype(ml_dtypes.bfloat16)]),
    factor=st.sampled_from([1.0, 0.5]),
    in_place=st.booleans(),
    limit=st.sampled_from([1, 200, 1 << 20]),
)
def test_batches_of_many_vectors(
    lengths: list[int], dtype: np.dtype[Any], factor: float, in_place: bool, limit: int
) -> None:
    """Whatever the steps: of one element, across vectors, of all at once."""
    values = [[np.arange(n).astype(dtype) + dtype.type(rank) for n in lengths] for rank in range(SIZE)]
    wide = [
        np.sum([np.asarray(row[i], np.float32 if dtype.kind == "V" else dtype) for row in values], axis=0)
        for i in range(len(lengths))
    ]
    expected = [np.trunc(each * factor) if dtype.kind == "i" else each * np.float32(factor) for each in wide]

    def reduce(rank: int, exchange: Callable[[Array], list[Array]]) -> list[Array]:
        processes = exchange_rank_infos(rank, exchange)
        assert processes is not None
        source = spans_of([array.copy() for array in values[rank]])
        target = source if in_place else spans_of([np.zeros_like(array) for array in values[rank]])
        collectives = DirectCollectives(rank, processes, exchange, lambda: None, Workspace())
        assert collectives.allreduce(source, target, ReduceOp.SUM, 1.0, factor)
        return list(target.arrays())

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FOLDED", "_FOLDED_AT_LEAST", "_SCALED", "_READ"):
            patch.setattr(direct, name, max(limit, dtype.itemsize))
        found = on_ranks(reduce)
    for result in found:
        for one, right in zip(result, expected, strict=True):
            assert np.array_equal(one, right.astype(dtype))


def changed(exchange: Callable[[Array], list[Array]], index: int, value: int) -> Callable[[Array], list[Array]]:
    """The same, but the first vector of a rank is laid down with another word in it."""
    calls = []

    def exchanged(words: Array) -> list[Array]:
        calls.append(words)
        if len(calls) == 1:
            words = words.copy()
            words[index] = value
        return exchange(words)

    return exchanged


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (0, 1 << 22, "No such process"),
        (1, 8, "Bad address"),
        (2, 12345, "belongs to another process here"),
    ],
)
def test_one_unreadable_rank_makes_all_ranks_fall_back(
    caplog: pytest.LogCaptureFixture, index: int, value: int, reason: str
) -> None:
    with caplog.at_level("INFO", logger="horovod"):
        found = on_ranks(
            lambda rank, exchange: exchange_rank_infos(rank, changed(exchange, index, value) if rank == 1 else exchange)
        )
    assert found == [None] * SIZE
    assert "rank 1 of the group" in caplog.text and reason in caplog.text


def test_a_system_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_memory, "available", False)
    assert on_ranks(exchange_rank_infos) == [None] * SIZE


def reduce_large(communicator: Communicator, source: Array) -> None:
    """An allreduce of a vector into which every rank puts its number plus one."""
    source[:] = communicator.rank + 1
    target = np.zeros_like(source)
    communicator.allreduce([source], [target], ReduceOp.SUM, 1.0, 1.0)
    assert (target == sum(range(1, communicator.size + 1))).all()


def large(group: list[Communicator], make: Callable[[int], Array]) -> None:
    """One on all ranks, whose inputs are made by ``make(rank)``."""
    run_ranks(group, lambda communicator: reduce_large(communicator, make(communicator.rank)))


ELEMENTS = 1 << 18


def unreadable(rank: int) -> Array:
    """On rank 1 memory that no other process can read, as a device's driver maps it."""
    if rank != 1:
        return np.empty(ELEMENTS, np.float32)
    return np.frombuffer(mmap.mmap(-1, 4 * ELEMENTS, prot=mmap.PROT_WRITE), np.float32)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each rank's allreduce that tried to read the peers' memory, whether all ranks could."""
    found: list[bool] = []
    reduce = DirectCollectives.allreduce

    def noted(way: DirectCollectives, *arguments: Any) -> bool:
        found.append(reduce(way, *arguments))
        return found[-1]

    monkeypatch.setattr(DirectCollectives, "allreduce", noted)
    return found


def test_memory_that_others_cannot_read_goes_through_the_arena(taken: list[bool]) -> None:
    with group_of("shm-direct", SIZE) as group:
        large(group, unreadable)
        assert taken == [False] * SIZE
        large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        assert taken == [False] * SIZE + [True] * SIZE


def test_a_group_that_cannot_read_uses_the_arena(monkeypatch: pytest.MonkeyPatch, taken: list[bool]) -> None:
    monkeypatch.setattr(cross_memory, "available", False)
    with group_of("shm-direct", SIZE) as group:
        for _ in range(2):
            large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        assert taken == []


@pytest.mark.parametrize(
    ("error", "reason"), [(ProcessLookupError(3, "No such process"), "ended"), (OSError(14, "Bad address"), "freed")]
)
def test_a_read_that_fails_names_the_peer(monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str) -> None:
    with group_of("shm-direct", 2, timedelta(seconds=0.5)) as group:
        large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        read = cross_memory.read

        def failing(process: int, nbytes: int, *iovecs: int) -> None:
            if nbytes > 1000:
                raise error
            read(process, nbytes, *iovecs)

        monkeypatch.setattr(cross_memory, "read", failing)
        found = outcomes(group, lambda communicator: reduce_large(communicator, np.empty(ELEMENTS, np.float32)))
    for rank, each in enumerate(found):
        assert isinstance(each, PeerFailure)
        assert each.rank == 1 - rank and each.suspected and reason in each.reason


def test_ranks_try_both_ways_and_agree_on_the_quicker_one(monkeypatch: pytest.MonkeyPatch, taken: list[bool]) -> None:
    monkeypatch.setattr(large_module, "_LARGE", 1 << 20)
    with group_of("shm-auto", 2) as group:
        for _ in range(8):
            large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        assert len(taken) == 2 * 4  # four of the eight tries, on both ranks
        large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        direct = (len(taken) - 2 * 4) // 2
        assert len(taken) == 2 * 4 + 2 * direct and direct in (0, 1)  # both ranks go the same way
        for _ in range(4):
            large(group, lambda rank: np.empty(ELEMENTS, np.float32))
        assert len(taken) == 2 * 4 + 2 * 5 * direct  # and keep to it


@pytest.mark.parametrize("operation", ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall"])
def test_data_read_from_an_aborted_rank_is_not_used(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """It was told of a failure when it had nothing left to do but to wait for who still reads its tensors, and used their
    memory for something else."""
    gone, reading, began = threading.Event(), threading.Event(), threading.Event()
    elements = 300_000
    read, reads = cross_memory.read, [0]

    def read_late(process: int, nbytes: int, *rest: Any) -> None:
        if threading.current_thread().name == "late" and began.is_set() and nbytes > 1000:  # less is a trial
            reads[0] += 1
            if reads[0] == (2 if operation == "allreduce" else 1):  # the last: an allreduce has folded its shard before
                reading.set()
                assert gone.wait(SOON)
        read(process, nbytes, *rest)

    monkeypatch.setattr(cross_memory, "read", read_late)

    def collective(communicator: Communicator, source: Array, target: Array) -> None:
        half = elements // 2
        if operation == "allreduce":
            communicator.allreduce([source], [source], ReduceOp.SUM, 1.0, 1.0)
        elif operation == "allgather":
            communicator.allgather([source], [target], [[elements, elements]])
        elif operation == "broadcast":
            communicator.broadcast([source], 0)
        elif operation == "reducescatter":
            communicator.reducescatter([source], [target[:half]], [[half, half]], ReduceOp.SUM, 1.0, 1.0)
        else:
            communicator.alltoall([source], [target[:elements]], [half, half], [half, half], half)

    with group_of("shm-direct", 2) as group:
        sources = [np.ones(elements, np.float32) for _ in range(2)]  # alive to the end, or it could not be read at all

        def script(communicator: Communicator) -> str:
            source, target = sources[communicator.rank], np.empty(2 * elements, np.float32)
            communicator.allreduce([np.ones(elements)], [np.empty(elements)], ReduceOp.SUM, 1.0, 1.0)  # both meet here
            if communicator.rank == 1:
                threading.current_thread().name = "late"
                began.set()
            try:
                collective(communicator, source, target)
            except (Aborted, PeerFailure) as error:
                return type(error).__name__
            finally:
                if communicator.rank == 0:
                    source[:] = target[:] = np.nan
                    gone.set()
            return "success"

        def abort() -> None:
            assert reading.wait(SOON)
            words = group[0]._counters._words.values  # type: ignore[attr-defined]
            mine, theirs = word_index(0, PACKED), word_index(1, PACKED)
            wait_until(lambda: words[mine] > words[theirs], "a rank that has nothing left to do but to wait")
            group[0].abort()

        aborting = threading.Thread(target=abort)
        aborting.start()
        assert outcomes(group, script) == ["Aborted", "PeerFailure"]
        aborting.join(SOON)


def test_memory_for_reads_is_bounded_for_any_number_of_ranks() -> None:
    held = {peers: peers * folded_bytes(peers) for peers in (1, 2, 7, 15, 63, 255, 1023)}
    assert held[1] == 1 << 20 and held[7] == 7 * (512 << 10)
    assert max(held.values()) <= 8 << 20 and min(held.values()) >= 1 << 20


@pytest.mark.parametrize("size", [2, 8, 64])
def test_direct_reductions_of_many_ranks_keep_bounded_memory_for_all_data_types_together(size: int) -> None:
    """This process is all of the ranks, whose tensors are one: what it reads of the others, it reads of itself."""
    workspace, elements = Workspace(), 8 << 20
    for dtype in (np.dtype(np.float32), np.dtype(np.int64), np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)):
        source, target = np.ones(elements, dtype), np.zeros(elements, dtype)
        collectives = DirectCollectives(0, [os.getpid()] * size, lambda words: [words] * size, lambda: None, workspace)
        assert collectives.allreduce(spans_of([source]), spans_of([target]), ReduceOp.SUM, 1.0, 1.0)
        shard = elements // size
        assert (target[:shard] == dtype.type(size)).all() and not target[shard:].any()
    assert workspace.nbytes <= 14 << 20  # what is read, and what 16-bit floats are summed in
