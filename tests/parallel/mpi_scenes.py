"""What each rank of test_mpi_communicators.py runs under mpiexec: ``python mpi_scenes.py FOLDER SCENE...``

Every scene is a function; what it returns is written as JSON to ``FOLDER/<rank>``, by name of the scene.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod._bindings import exported_names as hvd
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives

WORLD = MPI.COMM_WORLD


def total(process_set: hvd.ProcessSet = hvd.global_process_set) -> float:
    """The sum of the MPI ranks of those that take part."""
    array = np.full(1, float(WORLD.rank))
    tensor = Tensor(array, DataType.FLOAT64, (1,))
    number = process_set.process_set_id
    collectives.allreduce("total", None, [tensor], [tensor], op=ReduceOp.SUM, process_set_id=number).wait()
    return float(array[0])


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, NotImplementedError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def whole_and_halves() -> Any:
    """The world as one job, then its even and its odd ranks as two at the same time, numbered from the last to the first."""
    half = WORLD.Split(WORLD.rank % 2, key=-WORLD.rank)
    found = []
    for comm in (WORLD, half, WORLD):
        basics.init(comm=comm)
        assert hvd.global_process_set.mpi_comm == comm
        found.append([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), total()])
        basics.shutdown()
        assert hvd.global_process_set.mpi_comm is None
    half.Free()
    return found


def sets_of_communicators() -> Any:
    """Both halves and a list of ranks as process sets of one job."""
    half = WORLD.Split(WORLD.rank % 2)
    mine, outer = hvd.ProcessSet(half), hvd.ProcessSet([3, 0])
    assert mine.ranks is None and mine.included() is None and mine.size() is None
    basics.init(comm=WORLD, process_sets=[outer, mine])
    found = [mine.process_set_id, mine.ranks, mine.rank(), total(mine), outer.process_set_id]
    if outer.included():
        found.append(total(outer))
    later = [hvd.ProcessSet(half), hvd.ProcessSet([0, 3])]
    basics.init(process_sets=later)
    assert [each.process_set_id for each in later] == [mine.process_set_id, outer.process_set_id]
    basics.shutdown()
    half.Free()
    return found


def duplicates() -> Any:
    """A list that names a half again, and a communicator that is the whole job: told on all ranks, and the job runs."""
    half, again = WORLD.Split(WORLD.rank % 2), WORLD.Dup()
    sets = [hvd.ProcessSet(half), hvd.ProcessSet([0, 2]), hvd.ProcessSet(again)]
    text = refused(lambda: basics.init(comm=WORLD, process_sets=sets))
    ids = [each.process_set_id for each in sets]
    basics.init(comm=WORLD, process_sets=sets[:1])
    found = [text, ids, total(), total(sets[0])]
    basics.shutdown()
    half.Free()
    again.Free()
    return found


def some_left_out() -> Any:
    """The last rank is in no group: it is told so, and the others are a job."""
    comm = WORLD.Split(MPI.UNDEFINED if WORLD.rank == WORLD.size - 1 else 0)
    if comm == MPI.COMM_NULL:
        return refused(lambda: basics.init(comm=comm))
    basics.init(comm=comm)
    found = [hvd.size(), total()]
    basics.shutdown()
    comm.Free()
    return found


def what_cannot_be() -> Any:
    """A set that is larger than the job, sets of communicators in a job of none, and a communicator of two groups."""
    half = WORLD.Split(WORLD.rank % 2)
    between = half.Create_intercomm(0, WORLD, 1 - WORLD.rank % 2)
    found = [
        refused(lambda: basics.init(comm=half, process_sets=[hvd.ProcessSet(WORLD)])),
        refused(lambda: basics.init(process_sets=[hvd.ProcessSet(half)])),
        refused(lambda: basics.init(comm=between)),
    ]
    assert not basics.is_initialized()
    basics.init(comm=WORLD, process_sets="dynamic")
    found.append(refused(lambda: hvd.add_process_set(hvd.ProcessSet(half))))
    found.append(total())
    basics.shutdown()
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    between.Free()
    half.Free()
    return found


def lists() -> Any:
    """Two lists of ranks under mpiexec, where the first of each list serves the meeting."""
    found = []
    for pair in ([1, 0], [3, 2]) * 2:
        if WORLD.rank in pair:
            basics.init(comm=pair)
            found.append([hvd.rank(), hvd.size(), total()])
            basics.shutdown()
    return found


def one_does_not_come() -> Any:
    """Rank 0 does not call ``init()``. Ends the MPI job, as MPI cannot take back what the others began."""
    os.environ["HOROVOD_START_TIMEOUT"] = "1"
    return "" if WORLD.rank == 0 else refused(lambda: basics.init(comm=WORLD))


def main(folder: str, *scenes: str) -> None:
    found = {scene: globals()[scene]() for scene in scenes}
    path = Path(folder, str(WORLD.rank))
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    if scenes == (one_does_not_come.__name__,):
        while len(list(Path(folder).glob("?"))) < WORLD.size:
            time.sleep(0.01)  # until all have written; bounded by the test
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
