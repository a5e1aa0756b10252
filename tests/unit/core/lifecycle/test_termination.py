"""The end of a generation by a failure: in which order worker threads, handles and the launcher learn of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod.control.failure import Cause, FailureKind
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer
from horovod.core.errors import (
    CollectiveTimeoutError,
    EngineFailureError,
    HorovodInternalError,
    RankLostError,
    RankRaisedError,
)
from horovod.core.lifecycle import termination as module
from horovod.core.lifecycle.termination import Termination
from horovod.core.negotiation.messages import Operation, Request


class FakeLane:
    """Notes what happens to it."""

    def __init__(self, number: int, seen: list[str], leaves: bool = True) -> None:
        self._number = number
        self._seen = seen
        self._leaves = leaves
        self.error: BaseException | None = None
        self.flying: list[SimpleNamespace] = []

    def entries(self) -> list[SimpleNamespace]:
        return self.flying

    def interrupt(self) -> None:
        self._seen.append(f"{self._number} interrupted")

    def await_exit(self, seconds: float) -> str:
        self._seen.append(f"{self._number} {'left' if self._leaves else 'stuck'}")
        return "" if self._leaves else "A thread did not leave a collective in time"

    def fail(self, error: BaseException) -> None:
        self._seen.append(f"{self._number} failed")
        self.error = error


class Launcher:
    """In place of the connection to it."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __call__(self, *_: object) -> Launcher:
        return self

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def put(self, *_: object, **__: object) -> None:
        self._seen.append("launcher told")

    def get(self, *_: object) -> bytes:
        return b'{"rank": 1, "reason": "another rank was first"}'


def fail(workers: dict[int, FakeLane], seen: list[str], monkeypatch: pytest.MonkeyPatch) -> Termination:
    termination = Termination(0, workers, 1.0)  # type: ignore[arg-type]
    termination.point = LauncherServer(("localhost", 1), b"secret")
    monkeypatch.setattr(module, "RendezvousClient", Launcher(seen))
    termination.fail(2, "it went away")
    assert termination.failed.is_set()
    return termination


def test_theoldest_collective_of_all_sets_is_the_one_that_the_failure_has_interrupted() -> None:
    assert module.oldest_collective([FakeLane(0, []), FakeLane(1, [])]) == ""  # type: ignore[list-item]
    lanes = [FakeLane(0, []), FakeLane(1, [])]
    for lane, name, since in ((0, "allreduce.loss", 2.0), (1, "sum", 1.0), (1, "other", 3.0)):
        request = Request(Operation.ALLREDUCE, name, ())
        lanes[lane].flying.append(SimpleNamespace(request=request, since=since))
    assert module.oldest_collective(lanes) == "allreduce 'sum'"  # type: ignore[arg-type]
    del lanes[1].flying[0]
    assert module.oldest_collective(lanes) == "allreduce 'loss'"  # type: ignore[arg-type]


def test_requests_fail_after_all_workers_have_left_and_without_waiting_for_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    workers = {number: FakeLane(number, seen) for number in (0, 1)}
    termination = fail(workers, seen, monkeypatch)
    assert seen == ["0 interrupted", "1 interrupted", "0 left", "1 left", "0 failed", "1 failed", "launcher told"]
    assert termination.error is termination.failure is workers[0].error is workers[1].error
    assert str(termination.error).startswith("Horovod: rank 2 failed: it went away. Every collective")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FailureKind.LOST, RankLostError),
        (FailureKind.RAISED, RankRaisedError),
        (FailureKind.TIME_LIMIT, CollectiveTimeoutError),
        (FailureKind.ENGINE, EngineFailureError),
    ],
)
def test_the_error_has_the_type_of_the_failure(kind: FailureKind, expected: type[HorovodInternalError]) -> None:
    termination = Termination(1, {}, 1.0)
    termination.fail(2, "it is late.", Cause(kind, "allreduce.loss", {2: "train.py:9"}))
    for error in (termination.error, termination.about_to_fail(0, "nothing")):
        assert error is not None and type(error) is expected
        assert error.ranks == (2,) and error.tensor == "allreduce.loss" and error.call_sites == {2: "train.py:9"}
        assert error.reason == "it is late."


def test_later_submissions_to_any_worker_say_that_a_worker_is_stuck(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    workers = {0: FakeLane(0, seen), 1: FakeLane(1, seen, leaves=False)}
    fail(workers, seen, monkeypatch)
    for worker in workers.values():
        assert isinstance(worker.error, HorovodInternalError)
        assert "end this process instead of using them again" in str(worker.error)
    assert "did not leave a collective in time" in caplog.text
