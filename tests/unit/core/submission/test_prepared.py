"""Collectives that are submitted many times: a call finds what the last one of its name prepared, if nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from horovod.comm.spans import Layout
from horovod.core.negotiation.messages import Operation, Request
from horovod.core.submission import prepared as module
from horovod.core.submission.prepared import Prepared, recall, remember


@pytest.fixture(autouse=True)
def empty_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_by_name", {})
    yield


def make(key: object, layout: Layout | None = None) -> Prepared:
    return Prepared(key, Request(Operation.ALLREDUCE, "x"), layout)


def test_a_call_with_the_same_key_gets_the_same_request() -> None:
    first = remember("x", make(("float32", 4)))
    assert recall("x", ("float32", 4)) is first
    assert recall("y", ("float32", 4)) is None


def test_a_call_with_another_key_is_prepared_anew() -> None:
    remember("x", make(("float32", 4)))
    assert recall("x", ("float32", 5)) is None
    second = remember("x", make(("float32", 5)))
    assert recall("x", ("float32", 5)) is second


def test_names_that_never_come_again_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 8)
    for number in range(100):
        remember(f"step {number}", make(number))
        assert len(module._by_name) <= 8
    assert recall("step 99", 99) is not None


def test_tensors_that_stay_where_they_are_are_described_once() -> None:
    tensors = make("key", Layout.of(np.dtype(np.float32), [4, 2]))
    first = tensors.at((64, 128))
    assert tensors.at((64, 128)) is first
    moved = tensors.at((64, 256))
    assert list(moved.addresses) == [64, 256]
    assert moved.layout is first.layout
