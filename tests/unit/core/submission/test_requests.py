"""What cannot be sent, or has no meaning, is refused where a request is made: in the thread that calls the collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import HOST, Operation, Request, TensorSpec
from horovod.core.submission import requests
from horovod.core.submission.requests import (
    make_request,
    prepared_call,
    sendable,
)
from part import draws

SPEC = (TensorSpec("x", DataType.FLOAT32, (4,)),)


def allreduce_request(name: str, data_type: DataType = DataType.FLOAT32, shape: Any = (4,), **given: Any) -> Request:
    return make_request(Operation.ALLREDUCE, "", name, [TensorSpec(name, data_type, shape)], **given)


REFUSED: dict[str, Callable[[], object]] = {
    "a name that is not Unicode": lambda: allreduce_request("\udc80"),
    "a name that is too long": lambda: allreduce_request("x" * (9 << 20)),
    "a factor that is a flag": lambda: allreduce_request("x", postscale=True),
    "a factor that is not finite": lambda: allreduce_request("x", prescale=float("nan")),
    "a root that is too large": lambda: sendable(Request(Operation.BROADCAST, "x", SPEC, root=1 << 70)),
    "a shape of NumPy's numbers": lambda: allreduce_request("x", shape=(np.int64(4),)),
    "an average of flags": lambda: allreduce_request("x", DataType.BOOL),
    "a maximum of complex numbers": lambda: allreduce_request("x", DataType.COMPLEX64, op=ReduceOp.MAX),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_cannot_be_sent_are_refused_in_the_call(kind: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        REFUSED[kind]()


def test_factors_of_numpy_become_plain_numbers() -> None:
    request = allreduce_request("x", prescale=np.float32(2))
    assert type(request.prescale) is float
    assert request.prescale == 2.0


def test_a_request_that_is_too_long_says_how_long_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_REQUEST", 1000)
    many = [TensorSpec(f"gradient {number}", DataType.FLOAT32, (4,)) for number in range(100)]
    with pytest.raises(ValueError, match=r"Allreduce of 'x': to describe its 100 tensors takes \d+ bytes; 1000 can be"):
        make_request(Operation.ALLREDUCE, "", "x", many)


def test_requests_that_differ_in_their_line_only_are_the_same_to_all_ranks() -> None:
    first = Request(Operation.ALLREDUCE, "x", SPEC, caller="train.py:1")
    assert first.identity == Request(Operation.ALLREDUCE, "x", SPEC, caller="train.py:2").identity
    assert first.identity != Request(Operation.ALLREDUCE, "x", SPEC, postscale=2.0).identity


def test_a_step_submits_the_request_of_the_last_step() -> None:
    def gradients(name: str, columns: int = 4, op: ReduceOp = ReduceOp.SUM, line: str = "train.py:1") -> Request:
        tensors = [TensorSpec("", DataType.FLOAT32, (2, columns)), TensorSpec("", DataType.FLOAT32, (columns,))]
        labels = ["kernel", "bias"]
        return prepared_call(Operation.ALLREDUCE, "", name, tensors, op, 0.5, line=line, labels=labels).request

    first = gradients("optimizer 1")
    assert [spec.name for spec in first.tensors] == ["kernel", "bias"]
    assert gradients("optimizer 1") is first
    others = (gradients("optimizer 2"), gradients("optimizer 1", 5), gradients("optimizer 1", op=ReduceOp.MAX))
    assert all(other != first for other in others)
    assert gradients("optimizer 1", line="train.py:2").caller == "train.py:2"


@pytest.mark.parametrize("number", [1, 3])
def test_a_call_with_a_name_gets_the_request_of_the_last_one(number: int) -> None:
    def call(scale: float = 1.0) -> Request:
        tensors = [SPEC[0]] * number
        return prepared_call(
            Operation.ALLREDUCE, "allreduce", "metrics", tensors, ReduceOp.SUM, postscale=scale
        ).request

    first, again = (call() for _ in range(2))
    assert again is first
    assert call(scale=2.0).postscale == 2.0


def test_a_movement_with_a_name_gets_the_request_of_the_last_one() -> None:
    def call(rows: int = 4, splits: tuple[int, ...] = (1, 3), name: str = "tokens") -> Request:
        tensors = [TensorSpec("x", DataType.FLOAT32, (rows,))]
        return prepared_call(Operation.ALLTOALL, "alltoall", name, tensors, splits=splits).request

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


CALLS = st.fixed_dictionaries(
    {
        "operation": st.sampled_from([Operation.ALLREDUCE, Operation.ALLTOALL, Operation.BROADCAST]),
        "prefix": st.sampled_from(["", "one", "two"]),
        "name": st.sampled_from(["x", "y"]),
        "tensors": st.lists(
            st.builds(
                TensorSpec,
                st.just(""),
                st.sampled_from([DataType.FLOAT32, DataType.INT32]),
                st.sampled_from([(), (2,), (2, 3)]),
            ),
            min_size=1,
            max_size=2,
        ),
        "op": st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
        "prescale": st.sampled_from([1.0, 0.5]),
        "root": st.sampled_from([-1, 1]),
        "splits": st.sampled_from([(), (1, 1)]),
        "device": st.sampled_from([HOST, "gpu"]),
        "line": st.sampled_from(["train.py:1", "train.py:2"]),
        "alike": st.sampled_from(["", "dense"]),
    }
)


@settings(deadline=None, max_examples=draws(50))
@given(st.lists(CALLS, max_size=30), st.booleans())
def test_a_call_that_is_recognised_has_the_request_that_would_be_made_for_it(
    calls: list[dict[str, Any]], named: bool
) -> None:
    """Whatever came before, and however much of it was the same."""
    for call in calls:
        if call["prescale"] != 1.0:
            call["tensors"] = [TensorSpec("", DataType.FLOAT32, each.shape) for each in call["tensors"]]
        call["labels"] = [f"{call['alike']}{number}" for number in range(len(call["tensors"]))]
        if not named:
            call = {**call, "prefix": call["prefix"] or "three", "name": None}
        found = prepared_call(**call).request
        assert found == make_request(**call)
        assert prepared_call(**call).request is found
