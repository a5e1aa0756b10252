"""Objects that stand in errors, logs and debuggers say what they are, and do not print what they refer to."""

from __future__ import annotations

import time

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.single import SingleCommunicator
from horovod.core.negotiation.messages import Operation, Request, TensorSpec
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle


def test_a_handle_says_whether_it_is_done_and_why_it_failed() -> None:
    handle = Handle()
    assert repr(handle) == "Handle(pending)"
    handle.complete()
    assert repr(handle) == "Handle(done)"
    failed = Handle()
    failed.complete(ValueError("too late"))
    assert repr(failed) == "Handle(failed: too late)"


def test_an_entry_names_its_request_and_prints_no_tensor() -> None:
    vector = np.ones(4, np.float32)
    request = Request(Operation.ALLREDUCE, "allreduce.x", (TensorSpec("x", DataType.FLOAT32, (4,)),))
    entry = Entry(request, [vector], [vector], None, Handle(), time.monotonic())
    assert repr(entry) == "Entry('allreduce.x', 16 bytes, Handle(pending))"


def test_an_engine_says_which_rank_it_serves() -> None:
    assert repr(SingleCommunicator()) == "SingleCommunicator(rank 0 of 1)"
