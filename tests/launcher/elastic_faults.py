"""Has the ranks of an elastic job killed or stopped, one after another, at chosen points. Tests put it beside their scripts.

A script calls :func:`strike` at points that have names. There the faults of its job happen in their order, each once in the
life of the job: a file says that it has.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(os.environ.get("FAULTS_FOLDER", "."))
FIRST, LAST = "first", "last"


class Fault(NamedTuple):
    """What happens to one rank.

    Attributes:
        where: the name of a point.
        who: ``FIRST`` for rank 0, ``LAST`` for the highest rank.
        step: the earliest step at which it happens.
        how: ``"KILL"`` or ``"STOP"``.
    """

    where: str
    who: str
    step: int = 0
    how: str = "KILL"


def plan(folder: Path, faults: list[Fault]) -> None:
    """Called by the test: what is to happen to the job whose scripts run with ``FAULTS_FOLDER`` set to ``folder``."""
    (folder / "faults.json").write_text(json.dumps(faults))


def struck(folder: Path) -> int:
    """How many faults have happened."""
    return len(list(folder.glob("fault.*")))


def strike(where: str, rank: int, size: int, step: int) -> None:
    """Kill or stop this process, if it is the rank that the next fault is meant for, and this its point."""
    faults = [Fault(*each) for each in json.loads((FOLDER / "faults.json").read_text())]
    number = struck(FOLDER)
    if number == len(faults):
        return
    fault = faults[number]
    if (fault.where, fault.who) == (
        where,
        FIRST if rank == 0 else LAST if rank == size - 1 else "",
    ) and step >= fault.step:
        (FOLDER / f"fault.{number}").touch()
        os.kill(os.getpid(), getattr(signal, f"SIG{fault.how}"))
        signal.pause()  # the signal may reach another thread first


def before(owner: Any, name: str, act: Callable[[Any], object]) -> None:
    """Have ``act(first argument)`` called before each call of a function."""
    function = getattr(owner, name)

    def wrapper(first: Any, *arguments: Any, **keywords: Any) -> Any:
        act(first)
        return function(first, *arguments, **keywords)

    setattr(owner, name, wrapper)


def where_ranks_meet(step: Callable[[], int]) -> None:
    """Make points of what all bindings have in common: ``"allreduce"``, in the middle of one, and ``"reinit"``, when the
    ranks of a further round have met and are not connected."""
    from horovod.comm import spans
    from horovod.comm.exchange import communicator as exchange
    from horovod.comm.shm import communicator as shm
    from horovod.comm.shm import direct_reads as direct
    from horovod.core.lifecycle import context
    from horovod.core.lifecycle.generation import Generation

    def reducing(_: Any) -> None:
        me = context.current().identity
        strike("allreduce", me.rank, me.size, step())

    def connecting(generation: Generation) -> None:
        if os.environ["HOROVOD_ELASTIC_ROUND"] != "1":
            strike("reinit", generation.identity.rank, generation.identity.size, step())

    for module in (exchange, shm, direct, spans):
        before(module, "reduce_into", reducing)
    before(Generation, "_connect", connecting)
