"""A rank is lost in the middle of an allreduce: killed, crashed, gone, or stopped. The others hear of it, by name. One that
is only held up is waited for.

Ranks run the core alone, without a framework, so that losing them costs little. A :class:`Blow` strikes one rank at a
chosen point: rank 1, at the second allreduce, at its second piece.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ranks import Death, Pools, RankPool, Templates
from time_limits import SOON
from torch_versions import GLOO

SIZE = 3
ENGINES = ["shm", "direct", "tcp", "hierarchical", *GLOO]
"""``direct``: shm, where ranks read one another's memory. ``hierarchical``: the last rank is taken to be on a host of
its own."""

JOBS = [(engine, victim) for engine in ENGINES for victim in range(SIZE) if (engine, victim) != ("hierarchical", 1)]
"""By engine, who is struck. Of three ranks on two hosts, the second one of the first has no part of its own to reduce."""

ELEMENTS = 2_500_000  # more than one piece in every engine
LIMIT = SOON
TIMEOUT = "6"
SHORT_TIMEOUT = "3"
HELD_UP = 7
"""Seconds that a rank is held up for, more than twice the short timeout."""


class Blow(NamedTuple):
    """What strikes whom, and when: on a thread that reduces, between two pieces of an allreduce."""

    rank: int
    how: str
    allreduce: int = 2
    piece: int = 2

    def arm(self) -> None:
        """Called on every rank after ``init()``."""
        from horovod.comm.bytewise import communicator as bytewise_communicator
        from horovod.comm.exchange import communicator as exchange_communicator
        from horovod.comm.shm import communicator as shm_communicator
        from horovod.comm.shm import direct_reads as direct
        from horovod.core.lifecycle import context

        if context.current().identity.rank != self.rank:
            return
        communicator: Any = context.current().workers[0].communicator
        calls, pieces = [0], count(1)  # pieces may be reduced by two threads
        allreduce = communicator.allreduce

        def counted(*arguments: Any) -> None:
            calls[0] += 1
            allreduce(*arguments)

        communicator.allreduce = counted
        for module in (direct, shm_communicator, exchange_communicator, bytewise_communicator):
            module.reduce_into = self._struck(module.reduce_into, calls, pieces)  # type: ignore[attr-defined]

    def _struck(self, reduce_into: Callable[..., None], calls: list[int], pieces: Iterator[int]) -> Callable[..., None]:
        def reduce(*arguments: Any) -> None:
            if calls[0] == self.allreduce and next(pieces) == self.piece:
                strike(self.how)
            reduce_into(*arguments)

        return reduce


def strike(how: str) -> None:
    """End, stop or hold up this process."""
    if how == "exit":
        os._exit(3)
    if how == "hold":
        ctypes.PyDLL(None).sleep(HELD_UP)  # keeps the interpreter's lock: no thread of this process does anything
        return
    if how == "stick":
        from horovod.core.lifecycle import context

        deadline = time.monotonic() + LIMIT / 2
        while context.current().stopped is None and time.monotonic() < deadline:
            time.sleep(0.1)  # this thread alone
        return
    numbers = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
    signal.raise_signal(numbers[how])  # to this thread: one for the process may reach another, and this one would go on


def reduce(name: str, elements: int) -> None:
    """A synchronous allreduce of ones."""
    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.core.lifecycle import context
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    array = np.ones(elements, np.float32)
    tensor = Tensor(array, DataType.FLOAT32, (elements,))
    collectives.allreduce("allreduce", name, [tensor], [tensor], op=ReduceOp.SUM).wait()
    assert array[0] == array[-1] == context.current().identity.size


class Survival(NamedTuple):
    """What a survivor saw.

    Attributes:
        text: of the error.
        again: of the error of the next collective.
        left: what was left behind after ``shutdown()``.
    """

    text: str
    again: str
    left: list[str]


def framework_of(engine: str) -> str | None:
    """What imports all that the engine stands on."""
    return "torch" if engine == "gloo" else None


def choose_host() -> None:
    """Where the engine is hierarchical, be on one of two hosts."""
    if os.environ["HOROVOD_CPU_OPERATIONS"] == "hierarchical" and os.environ["HOROVOD_RANK"] == str(SIZE - 1):
        os.environ["HOROVOD_HOSTNAME"] = "another"


def work(blow: Blow) -> Survival:
    """Reduce until something happens."""
    from horovod.common import basics
    from horovod.core.errors import RankLostError
    from horovod.core.lifecycle import context
    from leaks import Inventory, left_behind

    choose_host()
    before = Inventory.take()
    basics.init()
    blow.arm()
    errors = []
    for step in range(blow.allreduce + 1):
        try:
            reduce(f"step{step}", ELEMENTS)
        except RankLostError as error:
            assert str(error).startswith(f"Horovod: rank {error.ranks[0]} ") and error.reason in str(error)
            errors.append(str(error))
    context.shutdown()
    assert not context.is_initialized()
    text, again = errors
    patience = 0.0 if NOT_ENDED in text else SOON / 2  # what Gloo still uses stays
    return Survival(text, again, left_behind(before, patience=patience))


def work_on(blow: Blow) -> str:
    """Reduce, whatever happens; the error, if there is one."""
    from horovod.common import basics
    from horovod.core.errors import HorovodInternalError
    from horovod.core.lifecycle import context

    choose_host()
    basics.init()
    blow.arm()
    try:
        for step in range(blow.allreduce + 1):
            reduce(f"step{step}", ELEMENTS)
    except HorovodInternalError as error:
        return str(error)
    finally:
        context.shutdown()
    return ""


def settings(engine: str, timeout: str = TIMEOUT) -> dict[str, str]:
    return {
        "HOROVOD_CPU_OPERATIONS": "shm" if engine == "direct" else engine,
        "HOROVOD_SHM_DIRECT": "always" if engine == "direct" else "never",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": timeout,
    }


ENDED = r"its process ended|the connection to it was lost"
SILENT = r"it no longer answers"


NOT_ENDED = " The engine gloo has not ended an operation in time, "
"""How an error says that Gloo still uses memory: its thread waits for a send that began just as the connection broke, and
nothing can wake it."""


def check(victim: int, survivors: list[Survival], reason: str) -> None:
    for survival in survivors:
        text, not_ended, _ = survival.text.partition(NOT_ENDED)
        assert re.match(rf"Horovod: rank {victim} \(host \w+, process \d+\) failed: ({reason})", text)
        assert "Every collective of this job has ended with this error, on all ranks." in text
        assert survival.again == survival.text  # the same cause for whatever comes later
        assert survival.left == [] or not_ended
    assert len({survival.text.partition(NOT_ENDED)[0] for survival in survivors}) == 1  # all report the same reason


_OF_MPI = ("mpich", "mpl", "mpi", "vader", "sm_segment", "pmix")


@pytest.fixture
def files() -> Iterator[None]:
    """Nothing may be left in the file system but what the ranks did, which their flight recorders write."""

    def listing() -> set[str]:
        # Another test's MPI may have memory of its own there at the same time.
        found = {str(path) for path in Path("/dev/shm").iterdir() if not path.name.startswith(_OF_MPI)}
        names = [path for folder in {Path("/tmp"), Path(tempfile.gettempdir())} for path in folder.iterdir()]
        recorded = f"horovod-{os.getuid()}"
        return found | {str(path) for path in names if "horovod" in path.name.lower() and path.name != recorded}

    before = listing()
    yield
    assert listing() <= before


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("engine", "victim", "how"),
    [
        *((engine, victim, "kill") for engine, victim in JOBS),
        ("shm", 1, "exit"),
        ("tcp", 0, "exit"),
        ("shm", 0, "abort"),
    ],
)
def test_a_process_that_ends(ranks: Callable[..., RankPool], engine: str, victim: int, how: str) -> None:
    pool = ranks(SIZE, settings(engine), framework_of(engine))
    results = pool.run(work, Blow(victim, how), timeout=LIMIT, dies={victim})
    statuses = {"kill": -signal.SIGKILL, "exit": 3, "abort": -signal.SIGABRT}
    assert results[victim] == Death(statuses[how]), pool.output(victim)
    check(victim, [result for rank, result in enumerate(results) if rank != victim], ENDED)


def side_by_side(
    templates: Templates,
    jobs: list[tuple[str, int]],
    function: Callable[[Blow], Any],
    how: str,
    timeout: str,
    without_victim: bool,
) -> dict[tuple[str, int], list[Any]]:
    """By engine and struck rank: what ``function`` returned, on all ranks or on the others. The jobs mostly wait."""
    pools = []
    try:
        calls = []
        for engine, victim in jobs:
            pools.append(RankPool(SIZE, settings(engine, timeout), framework_of(engine), templates))
            others = [rank for rank in range(SIZE) if rank != victim]
            own = pools[-1].start(function, Blow(victim, how), ranks=[victim])
            calls.append([pools[-1].start(function, Blow(victim, how), ranks=others)])
            if not without_victim:
                calls[-1].append(own)
        return {
            job: [result for call in each for result in call.results(LIMIT)]
            for job, each in zip(jobs, calls, strict=True)
        }
    finally:
        for pool in pools:
            pool.close()


@pytest.fixture(scope="module")
def stopped(pools: Pools) -> dict[tuple[str, int], list[Survival]]:
    return side_by_side(pools.templates, JOBS, work, "stop", TIMEOUT, without_victim=True)


@pytest.mark.parametrize(("engine", "victim"), JOBS)
def test_a_process_that_is_stopped(stopped: dict[tuple[str, int], list[Survival]], engine: str, victim: int) -> None:
    check(victim, stopped[engine, victim], SILENT)


def test_a_process_that_nothing_in_python_can_run_in_is_waited_for(pools: Pools) -> None:
    """Something holds the interpreter's lock in the middle of a collective, so that the rank cannot even say that it lives."""
    jobs = [(engine, victim) for engine, victim in JOBS if victim < 2]
    found = side_by_side(pools.templates, jobs, work_on, "hold", SHORT_TIMEOUT, without_victim=False)
    assert found == {job: [""] * SIZE for job in jobs}


def test_a_rank_that_answers_but_is_stuck_in_a_collective(pools: Pools) -> None:
    jobs = [(engine, victim) for engine, victim in JOBS if victim < 2]
    found = side_by_side(pools.templates, jobs, work_on, "stick", SHORT_TIMEOUT, without_victim=False)
    for (engine, victim), texts in found.items():
        assert len(texts) == SIZE and len(set(texts)) == 1, "\n".join([engine, *texts])
        reason = "it made no progress in a collective for 3 seconds"
        assert re.match(rf"Horovod: rank {victim} \(host \w+, process \d+\) failed: {reason}", texts[0]), texts[0]
