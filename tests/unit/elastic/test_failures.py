"""Failed collectives that a framework reports as errors of its own."""

from __future__ import annotations

import pytest

from horovod.core.errors import HorovodInternalError
from horovod.elastic.failures import converting


class GraphError(Exception):
    """A framework's."""


def raising(error: BaseException) -> None:
    raise error


def test_what_a_graph_reports_of_a_collective_becomes_the_collectives_error() -> None:
    text = "in node py_func: HorovodInternalError: Horovod: rank 1 failed: it was killed.\nTraceback (most recent call last):\n"
    error = GraphError(text)
    with pytest.raises(HorovodInternalError) as caught:
        converting(raising, GraphError)(error)
    assert str(caught.value) == "Horovod: rank 1 failed: it was killed."
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [GraphError("division by zero"), ValueError("HorovodInternalError")])
def test_everything_else_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        converting(raising, GraphError)(error)
    assert caught.value is error


def test_an_error_of_both_kinds_stays_what_it_is() -> None:
    class Both(GraphError, HorovodInternalError):
        pass

    error = Both("rank 1 failed")
    with pytest.raises(Both) as caught:
        converting(raising, GraphError)(error)
    assert caught.value is error
