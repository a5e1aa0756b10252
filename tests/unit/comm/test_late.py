"""An engine that is built at its first collective: once, with what was set before, and an abort ends whatever it does."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable

import numpy as np
import pytest

from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.forwarding import ForwardingCommunicator
from horovod.comm.late import LateCommunicator
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.tuned import TunedSettings
from time_limits import SOON


class NotedCommunicator(SingleCommunicator):
    """Notes what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def tune(self, settings: TunedSettings) -> None:
        self.seen.append(settings)

    def abort(self) -> None:
        self.seen.append("aborted")

    def descriptors(self) -> list[int]:
        return [7]

    def close(self) -> None:
        self.seen.append("closed")


def late(build: Callable[[], Communicator], cancel: Callable[[], None] = lambda: None) -> LateCommunicator:
    return LateCommunicator("tcp", 0, 1, build, cancel)


def test_it_is_built_once_at_the_first_collective_with_what_was_set_before() -> None:
    built: list[NotedCommunicator] = []

    def build() -> Communicator:
        built.append(NotedCommunicator())
        return built[-1]

    made, settings = late(build), TunedSettings(0, 0, "", "auto", True, True)
    made.tune(settings)
    assert (built, made.descriptors(), made.engines(), made.may_still_read()) == ([], [], ["tcp"], False)
    source, target = np.ones(3), np.zeros(3)
    for _ in range(2):
        made.allreduce([source], [target], ReduceOp.SUM, 1.0, 2.0)
    assert target.tolist() == [2.0] * 3
    assert (len(built), made.descriptors(), built[0].seen) == (1, [7], [settings])
    made.abort()
    made.close()
    assert built[0].seen == [settings, "aborted", "closed"]


COLLECTIVES = {"allreduce", "allreduce_compressed", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"}
OTHERS = sorted(
    name
    for name, each in vars(ForwardingCommunicator).items()
    if inspect.isfunction(each) and not name.startswith("_") and name not in COLLECTIVES | {"forward"}
)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_collective_builds_nothing(name: str) -> None:
    """It is called on some ranks and not on others."""

    def build() -> Communicator:
        raise AssertionError("it is built")

    method = getattr(late(build), name)
    method(*[True] * len(inspect.signature(method).parameters))


def test_closing_what_was_never_used_builds_nothing() -> None:
    def build() -> Communicator:
        raise AssertionError("it is built")

    made = late(build)
    made.close()


def test_an_abort_before_the_first_collective_ends_it() -> None:
    cancelled: list[int] = []
    made = late(NotedCommunicator, lambda: cancelled.append(1))
    made.abort()
    with pytest.raises(Aborted):
        made.barrier()
    assert cancelled == [1]


def test_an_abort_while_it_is_built_ends_that() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def build() -> Communicator:
        begun.set()
        assert cancelled.wait(SOON)
        raise RuntimeError("cancelled")

    made = late(build, cancelled.set)
    thread = threading.Thread(target=lambda: (begun.wait(SOON), made.abort()))
    thread.start()
    with pytest.raises(Aborted):
        made.barrier()
    thread.join(SOON)


def test_an_abort_that_comes_too_late_for_the_building_is_passed_on() -> None:
    built = NotedCommunicator()

    def build() -> Communicator:
        made.abort()
        return built

    made = late(build)
    made.barrier()
    assert built.seen == ["aborted"]


def test_a_rank_that_cannot_build_it_suspects_itself() -> None:
    def build() -> Communicator:
        raise OSError("no more files")

    with pytest.raises(PeerFailure, match="could not connect to the other ranks: no more files") as caught:
        late(build).barrier()
    assert caught.value.rank == 0 and caught.value.suspected
