"""Requests that are submitted before their inputs have arrived."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest

from horovod.comm.datatypes import Array
from horovod.core.errors import HorovodInternalError
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from unit.core.workers import (
    Rank,
    Set,
    allreduce_request,
    error_of,
    ones,
    wait,
)


def held(rank: Rank, name: str, array: Array) -> Entry:
    entry = Entry(allreduce_request(name, array.shape), [array], [array], None, Handle(), time.monotonic())
    rank.worker.submit(entry, held=True)
    return entry


def test_a_held_request_is_announced_when_it_is_released_and_holds_up_no_other(process_set: Set) -> None:
    first, second = process_set.whole(2)
    arrays = [np.full(4, np.nan, np.float32) for _ in range(2)]
    entries = [held(rank, "late", array) for rank, array in zip((first, second), arrays, strict=True)]
    wait(*[rank.allreduce("now", ones()) for rank in (first, second)])
    assert not any(entry.handle.done() for entry in entries)
    with pytest.raises(ValueError, match="same name"):
        first.allreduce("late", ones())
    for rank, array, entry in zip((second, first), reversed(arrays), reversed(entries), strict=True):
        array[:] = 1
        rank.worker.release(entry)
    wait(*[entry.handle for entry in entries])
    assert [array.tolist() for array in arrays] == [[2.0] * 4] * 2


def test_a_held_request_fails_with_the_job_and_its_release_comes_to_nothing(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    array = weakref.ref(entry.inputs[0])
    rank.worker.abort(HorovodInternalError("rank 3 failed"))
    assert error_of(entry.handle) == "rank 3 failed"
    rank.worker.release(entry)
    del entry
    assert array() is None, "what failed still has its tensor"


def test_a_held_request_whose_inputs_never_come_fails_on_this_rank(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    rank.worker.release(entry, HorovodInternalError("the device is gone"))
    assert error_of(entry.handle) == "the device is gone"
    wait(rank.allreduce("late", ones()))


def test_a_name_that_was_withdrawn_is_free(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    entry = held(rank, "late", ones())
    rank.worker.withdraw(entry)
    rank.worker.release(entry)
    wait(rank.allreduce("late", ones()))
    assert not entry.handle.done()
