"""Failed collectives that a framework reports as errors of its own."""

from __future__ import annotations

import pytest

from horovod.core.errors import KINDS, HorovodInternalError, RankLostError
from horovod.core.lifecycle import context
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_kind_of_failure_it_was_survives_a_graph(kind: type[HorovodInternalError]) -> None:
    """By what this process has raised, else by the name in the framework's text."""
    raised = kind(f"tensor of {kind.__name__}\nas each rank submitted it:\n  rank 0", ranks=[0], tensor="x")
    for text, ranks in ((str(raised), (0,)), (f"another process has raised a {kind.__name__}", ())):
        with pytest.raises(kind) as caught:
            converting(raising, GraphError)(GraphError(f"in node py_func: {kind.__name__}: {text}\n\nTraceback:\n"))
        assert type(caught.value) is kind and str(caught.value) == text and caught.value.ranks == ranks


@pytest.mark.parametrize("error", [GraphError("division by zero"), ValueError("HorovodInternalError")])
def test_everything_else_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        converting(raising, GraphError)(error)
    assert caught.value is error


class Cancelled(GraphError):
    """Of an operation that did not run, because another one failed."""


class Job:
    """A runtime that is stopped, or runs."""

    def __init__(self, stopped: HorovodInternalError | None) -> None:
        self.stopped = stopped


@pytest.mark.parametrize("stopped", [None, RankLostError("rank 1 failed", ranks=[1])])
@pytest.mark.parametrize("kind", [GraphError, Cancelled])
def test_only_a_cancelled_operation_is_judged_by_the_state_of_the_job(
    monkeypatch: pytest.MonkeyPatch, kind: type[GraphError], stopped: RankLostError | None
) -> None:
    """An error of the script stays one, even if another rank has ended: it most likely had the same error first."""
    monkeypatch.setattr(context, "is_initialized", lambda: True)
    monkeypatch.setattr(context, "current", lambda: Job(stopped))
    error = kind("no collective is named here")
    expected = RankLostError if kind is Cancelled and stopped is not None else kind
    with pytest.raises(expected) as caught:
        converting(raising, (GraphError,), (Cancelled,))(error)
    assert type(caught.value) is expected and (caught.value is error or str(caught.value) == "rank 1 failed")


def test_an_error_of_both_kinds_stays_what_it_is() -> None:
    class Both(GraphError, HorovodInternalError):
        pass

    error = Both("rank 1 failed")
    with pytest.raises(Both) as caught:
        converting(raising, GraphError)(error)
    assert caught.value is error
