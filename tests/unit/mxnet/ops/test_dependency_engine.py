"""Operations in MXNet's engine that finish later."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import mxnet as mx
import pytest

from horovod.core import errors
from horovod.mxnet.ops import dependency_engine
from horovod.mxnet.ops.arrays import flat
from horovod.mxnet.ops.errors import HorovodArgumentError, HorovodInternalError
from time_limits import SOON


def test_readers_wait_until_it_finishes_on_whatever_thread() -> None:
    x, started = mx.nd.ones((3,)), queue.SimpleQueue[dependency_engine.Finish]()
    dependency_engine.push(started.put, [], [x], 0, "test")
    y = x + 1

    def work() -> None:
        finish = started.get()
        flat(x)[:] = 5
        finish(None)

    thread = threading.Thread(target=work)
    thread.start()
    assert y.asnumpy().tolist() == [6.0] * 3
    thread.join()


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (errors.HorovodInternalError("rank 1 failed\n  at line 3\n    deeper\nend"), (HorovodInternalError,)),
        (HorovodInternalError("rank 1 failed: again"), (errors.HorovodInternalError, RuntimeError)),
        (ValueError("same name: 'x'"), (HorovodArgumentError, ValueError)),
    ],
)
def test_errors_surface_where_the_script_waits(error: BaseException, kinds: tuple[type, ...]) -> None:
    def fail(finish: dependency_engine.Finish) -> None:
        raise error

    for start in (fail, lambda finish: finish(error)):
        x = mx.nd.zeros((2,))
        dependency_engine.push(start, [], [x], 0, "test")
        with pytest.raises(mx.MXNetError) as found:
            (x + 1).wait_to_read()
        assert all(isinstance(found.value, kind) for kind in kinds)
        assert str(found.value) == str(error)


def test_an_error_of_any_other_kind_keeps_its_name_in_the_text() -> None:
    x = mx.nd.zeros((2,))
    dependency_engine.push(lambda finish: finish(ZeroDivisionError("by zero")), [], [x], 0, "test")
    with pytest.raises(mx.MXNetError, match="ZeroDivisionError: by zero"):
        x.wait_to_read()


def test_arrays_are_let_go_of_when_an_operation_has_finished_or_failed() -> None:
    x = mx.nd.ones((2,))
    before = sys.getrefcount(x)
    for finish_with in (None, ValueError("wrong")):
        written = mx.nd.zeros((1,))
        dependency_engine.push(lambda finish, error=finish_with: finish(error), [x], [written], 0, "test")
        dependency_engine.drain()
        assert sys.getrefcount(x) == before and not dependency_engine._pushed
    with pytest.raises(ValueError, match="wrong"):
        written.wait_to_read()


def test_what_depends_on_a_failed_computation_is_left_out() -> None:
    wrong, result = mx.nd.random.normal(0, -1, (2,)), mx.nd.zeros((2,))
    started: list[Any] = []
    left_out = threading.Event()
    dependency_engine.push(started.append, [wrong], [result], 0, "test", left_out.set)
    assert left_out.wait(SOON) and not started
    with pytest.raises(mx.MXNetError):
        result.wait_to_read()
    dependency_engine.drain()
    assert not dependency_engine._pushed


def test_arrays_stay_as_they_are_inside_a_reading_block() -> None:
    x = mx.nd.ones((2,))
    x += 1
    with dependency_engine.Reading([x], "test"):
        assert flat(x).tolist() == [2.0, 2.0]
        x += 1  # comes after the block
        assert (mx.nd.ones((2,)) * 3).asnumpy().tolist() == [3.0, 3.0]
        assert flat(x).tolist() == [2.0, 2.0]
    assert x.asnumpy().tolist() == [3.0, 3.0]
    with pytest.raises(KeyError), dependency_engine.Reading([x], "test"):
        raise KeyError
    x += 1
    assert x.asnumpy().tolist() == [4.0, 4.0]


def test_a_reading_block_on_what_has_failed_raises_and_is_not_entered() -> None:
    wrong = mx.nd.random.normal(0, -1, (2,))
    with pytest.raises(mx.MXNetError), dependency_engine.Reading([wrong], "test"):
        raise AssertionError("must not be reached")
    dependency_engine.drain()
