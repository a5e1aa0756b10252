"""What cannot be sent, or has no meaning, is refused where a request is made: in the thread that calls the collective."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation, Request, TensorSpec
from horovod.core.submission import requests
from horovod.core.submission.requests import (
    allreduce_call,
    allreduce_request,
    make_request,
    prepared_allreduce,
    sendable,
)

ONE = [("x", DataType.FLOAT32, (4,))]
SPEC = (TensorSpec("x", DataType.FLOAT32, (4,)),)

REFUSED: dict[str, Callable[[], object]] = {
    "a name that is not Unicode": lambda: allreduce_request("\udc80", ONE),
    "a name that is too long": lambda: allreduce_request("x" * (9 << 20), ONE),
    "a factor that is a flag": lambda: allreduce_request("x", ONE, postscale=True),
    "a factor that is not finite": lambda: allreduce_request("x", ONE, prescale=float("nan")),
    "a root that is too large": lambda: sendable(Request(Operation.BROADCAST, "x", SPEC, root=1 << 70)),
    "a shape of NumPy's numbers": lambda: allreduce_request("x", [("x", DataType.FLOAT32, (np.int64(4),))]),
    "an average of flags": lambda: allreduce_request("x", [("x", DataType.BOOL, (4,))]),
    "a maximum of complex numbers": lambda: allreduce_request("x", [("x", DataType.COMPLEX64, (4,))], ReduceOp.MAX),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_cannot_be_sent_are_refused_in_the_call(kind: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        REFUSED[kind]()


def test_factors_of_numpy_become_plain_numbers() -> None:
    request = allreduce_request("x", ONE, prescale=np.float32(2))
    assert type(request.prescale) is float
    assert request.prescale == 2.0


def test_a_request_that_is_too_long_says_how_long_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_REQUEST", 1000)
    many = [(f"gradient {number}", DataType.FLOAT32, (4,)) for number in range(100)]
    with pytest.raises(ValueError, match=r"Allreduce of 'x': to describe its 100 tensors takes \d+ bytes; 1000 can be"):
        allreduce_request("x", many)


def test_requests_that_differ_in_their_line_only_are_the_same_to_all_ranks() -> None:
    first = Request(Operation.ALLREDUCE, "x", SPEC, caller="train.py:1")
    assert first.identity == Request(Operation.ALLREDUCE, "x", SPEC, caller="train.py:2").identity
    assert first.identity != Request(Operation.ALLREDUCE, "x", SPEC, postscale=2.0).identity


def test_a_step_submits_the_request_of_the_last_step() -> None:
    def gradients(name: str, columns: int = 4, op: ReduceOp = ReduceOp.SUM, line: str = "train.py:1") -> Request:
        tensors = [("kernel", DataType.FLOAT32, (2, columns)), ("bias", DataType.FLOAT32, (columns,))]
        return prepared_allreduce(name, tensors, op, 0.5, 1.0, line).request

    first = gradients("optimizer 1")
    assert [spec.name for spec in first.tensors] == ["kernel", "bias"]
    assert gradients("optimizer 1") is first
    others = (gradients("optimizer 2"), gradients("optimizer 1", 5), gradients("optimizer 1", op=ReduceOp.MAX))
    assert all(other != first for other in others)
    assert gradients("optimizer 1", line="train.py:2").caller == "train.py:2"


@pytest.mark.parametrize("number", [1, 3])
def test_a_call_with_a_name_gets_the_request_of_the_last_one(number: int) -> None:
    def call(scale: float = 1.0) -> Request:
        return allreduce_call("allreduce", "metrics", [SPEC[0]] * number, ReduceOp.SUM, postscale=scale)

    first, again = (call() for _ in range(2))
    assert again is first
    assert call(scale=2.0).postscale == 2.0


def test_a_movement_with_a_name_gets_the_request_of_the_last_one() -> None:
    def call(rows: int = 4, splits: tuple[int, ...] = (1, 3), name: str = "tokens") -> Request:
        tensors = [TensorSpec("x", DataType.FLOAT32, (rows,))]
        return make_request(Operation.ALLTOALL, "alltoall", name, tensors, splits=splits)

    first, again = (call() for _ in range(2))
    assert again is first
    others = [call(rows=5), call(splits=(2, 2)), call(name="labels")]
    assert [each.tensors[0].shape for each in others] == [(5,), (4,), (4,)]
    assert [each.splits for each in others] == [(1, 3), (2, 2), (1, 3)]


def test_ranks_may_gather_different_numbers_of_rows() -> None:
    def gathering(*shape: int) -> bytes:
        return Request(Operation.ALLGATHER, "x", (TensorSpec("x", DataType.FLOAT32, shape),)).identity

    assert gathering(1, 3) == gathering(7, 3)
    assert gathering(1, 3) != gathering(1, 4)
