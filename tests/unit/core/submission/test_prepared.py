"""Collectives that are submitted many times: a call finds what the last one of its name prepared, if nothing has changed."""

from __future__ import annotations

import numpy as np

from horovod.comm.spans import Layout, address_of
from horovod.core.negotiation.messages import Operation, Request
from horovod.core.submission.prepared import Prepared, recall, remember


def make(key: object, layout: Layout | None = None) -> Prepared:
    return Prepared(key, Request(Operation.ALLREDUCE, "x"), layout)


def test_a_call_with_the_same_key_gets_the_same_request() -> None:
    name = object()
    first = remember(name, make(("float32", 4)))
    assert recall(name, ("float32", 4)) is first
    assert recall(object(), ("float32", 4)) is None


def test_a_call_with_another_key_is_prepared_anew() -> None:
    name = object()
    remember(name, make(("float32", 4)))
    assert recall(name, ("float32", 5)) is None
    second = remember(name, make(("float32", 5)))
    assert recall(name, ("float32", 5)) is second


def test_names_that_never_come_again_do_not_fill_the_memory() -> None:
    many = 20_000
    for number in range(many):
        remember(f"step {number}", make(number))
    assert sum(recall(f"step {number}", number) is not None for number in range(many)) < many / 2
    assert recall(f"step {many - 1}", many - 1) is not None


def test_tensors_that_stay_where_they_are_are_described_once() -> None:
    tensors = make("key", Layout.of(np.dtype(np.float32), [4, 2]))
    first = tensors.at((64, 128))
    assert tensors.at((64, 128)) is first
    moved = tensors.at((64, 256))
    assert list(moved.addresses) == [64, 256]
    assert moved.layout is first.layout


def test_arrays_are_those_of_the_present_addresses() -> None:
    tensors = make("key", Layout.of(np.dtype(np.float32), [2]))
    one, other = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    first = tensors.arrays_at((address_of(one),))
    assert tensors.arrays_at((address_of(one),)) is first
    for array in (other, one, other):
        tensors.at((address_of(array),))
        (found,) = tensors.arrays_at((address_of(array),))
        assert found.tolist() == array.tolist()
        found[0] += 10
        assert found[0] == array[0]
