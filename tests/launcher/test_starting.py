"""Ranks on their way into ``init()``: one that has ended is not waited for, and the end of the job names it."""

from __future__ import annotations

import re

import pytest

import horovod
from horovod.common.basics import init
from launcher.harness import Launcher, finish

SCRIPT = """
import os, signal, sys, time
from horovod.common.basics import init, shutdown
rank = int(os.environ["HOROVOD_RANK"])
"""
NEVER = "3600"
"""Seconds until the ranks would give up waiting: so late that the test fails before."""


def run(launcher: Launcher, ranks: int, program: str, **environment: str) -> tuple[int, str]:
    words = ("-np", str(ranks), "--start-timeout", NEVER, "python", "-c", SCRIPT + program)
    done = launcher.run(*words, **environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("sys.exit(0)", "exit code 0"),
        ("sys.exit(3)", "exit code 3"),
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit code 137 (killed by SIGKILL)"),
    ],
)
def test_ranks_in_init_hear_at_once_of_one_that_ended(launcher: Launcher, ending: str, told: str) -> None:
    status, err = run(launcher, 3, f"if rank == 1:\n    {ending}\ninit()")
    assert status != 0
    assert err.count("RendezvousError: hvd.init() cannot complete") == 1, "of one of them; the other refers to it"
    for waiting in (0, 2):
        assert re.search(rf"\[{waiting}\]<stderr>:.*\bhorovod.control.rendezvous.messages.RendezvousError", err)
    assert f"rank 1 of 3 has ended ({told}) instead of calling it" in err
    assert "horovodrun: the job failed. Rank 1 failed first (localhost, local rank 1)." in err
    assert "Process name: 1" in err


def test_the_last_lines_say_what_a_rank_that_ended_well_did_wrong(launcher: Launcher) -> None:
    status, err = run(launcher, 2, "if rank == 0:\n    sys.exit(0)\ninit()")
    assert status == 1
    last = err[err.index("horovodrun: the job failed.") :].splitlines()
    assert last == [
        "horovodrun: the job failed. Rank 0 failed first (localhost, local rank 0).",
        "Reason: it ended (exit code 0) instead of calling hvd.init(), where rank 1 waited for it",
        "Process name: 0",
        "Exit code: 1, which is that of rank 1: it failed because of this",
    ]


def test_a_rank_that_comes_after_the_other_has_ended_is_told_too(launcher: Launcher) -> None:
    status, err = run(launcher, 2, "if rank == 1:\n    sys.exit(0)\ntime.sleep(1)\ninit()")
    assert status == 1
    assert "Rank 1 failed first" in err


def test_a_job_in_which_nobody_calls_init_is_fine(launcher: Launcher) -> None:
    assert run(launcher, 3, "time.sleep(0.2 * rank)") == (0, "")


def test_ranks_may_end_one_after_another_when_they_are_done(launcher: Launcher) -> None:
    assert run(launcher, 3, "init(); shutdown(); time.sleep(0.2 * rank)") == (0, "")


def test_a_rank_that_is_done_is_not_waited_for_in_a_second_init(launcher: Launcher) -> None:
    status, err = run(launcher, 2, "init(); shutdown()\nif rank == 0:\n    init()")
    assert status == 1
    assert "rank 1 of 2 has ended (exit code 0) instead of calling it" in err
    assert "Rank 1 failed first" in err


LEAVES = """
from horovod.core.submission.collectives import barrier
init()
barrier().wait()
if rank == 1:
    sys.exit(0)
time.sleep({pause})
barrier().wait()
"""


@pytest.mark.parametrize("pause", [0, 1])
def test_a_rank_that_leaves_while_others_go_on_is_named(launcher: Launcher, pause: int) -> None:
    status, err = run(launcher, 2, LEAVES.format(pause=pause))
    assert status == 1
    assert "Rank 1 failed first" in err
    assert "Reason: it left the job (hvd.shutdown() or the end of its script)" in err


MISMATCH = """
import numpy as np
from horovod._models.contents import described
from horovod.comm.reduction import ReduceOp
from horovod.core.submission.collectives import allreduce
init()
tensors = [described(np.zeros(2 + (rank == 1)))]
time.sleep(0.3 * (rank == {late}))
try:
    allreduce("allreduce", "x", tensors, tensors, ReduceOp.SUM, awaited=True).wait()
except RuntimeError:
    if rank != {catches}:
        raise
    allreduce("allreduce", "y", tensors, tensors, ReduceOp.SUM, awaited=True).wait()
"""


@pytest.mark.parametrize(("late", "catches"), [(0, None), (1, None), (0, 2), (2, 0)])
def test_an_error_that_all_ranks_raise_is_the_reason(launcher: Launcher, late: int, catches: int | None) -> None:
    """Whichever rank ends first, and although one may go on and miss the others."""
    status, err = run(launcher, 3, MISMATCH.format(late=late, catches=catches))
    assert status == 1
    assert "MismatchError: Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but" in err
    assert "Reason: MismatchError, as printed above" in err
    assert "Reason: it left" not in err


def test_an_exception_after_the_others_have_left_is_the_reason(launcher: Launcher) -> None:
    program = "init()\nif rank == 0:\n    sys.exit(0)\ntime.sleep(0.5)\nraise KeyError('late')"
    status, err = run(launcher, 2, program)
    assert status == 1
    assert "Reason: it raised KeyError: 'late'" in err


def test_a_rank_that_takes_no_part_may_end_at_any_time(launcher: Launcher) -> None:
    program = "if rank == 1:\n    sys.exit(0)\ntime.sleep(0.5 * rank)\ninit(comm=[0, 2]); shutdown()"
    assert run(launcher, 3, program) == (0, "")


def test_only_ranks_that_list_an_ended_rank_fail(launcher: Launcher) -> None:
    program = "if rank == 3:\n    sys.exit(0)\ninit(comm=[0, 1] if rank < 2 else [3, 2]); shutdown()"
    status, err = run(launcher, 4, program)
    assert status == 1
    assert (
        "[2]<stderr>:horovod.control.rendezvous.messages.RendezvousError: hvd.init(comm=[3, 2]) cannot complete" in err
    )
    assert "Rank 3 failed first" in err
    assert "[0]<stderr>" not in err and "[1]<stderr>" not in err


def test_a_script_that_catches_the_error_can_continue(launcher: Launcher) -> None:
    program = "if rank == 1:\n    sys.exit(0)\ntry:\n    init()\nexcept RuntimeError:\n    init(comm=[0])"
    assert run(launcher, 2, program) == (0, "")


def test_a_function_that_returns_before_init_is_named(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher.environment().items():
        monkeypatch.setenv(name, value)

    def work() -> None:
        import os

        if os.environ["HOROVOD_RANK"] == "0":
            init()

    with pytest.raises(
        RuntimeError, match=r"Rank 1 failed first.*\nReason: it ended \(exit code 0\) instead of calling"
    ):
        horovod.run(work, num_proc=2, start_timeout=int(NEVER))


def test_a_rank_that_is_only_late_is_waited_for(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "python", "-c", SCRIPT + "time.sleep(rank); init(); shutdown(); print('met')")
    launcher.await_line(process, "met", times=2)
    assert finish(process).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("HOROVOD_CPU_OPERATIONS", "Pigeon", "use shm, hierarchical, tcp"),
        ("HOROVOD_GPU_OPERATIONS", "nccl", "only horovod.torch"),
        ("HOROVOD_GPU_OPERATIONS", "Pigeon", "use nccl for the memory of GPUs"),
        ("HOROVOD_CONTROLLER", "MPI", "use gloo"),
    ],
)
def test_what_is_forced_and_does_not_exist_is_an_error_on_every_rank(
    launcher: Launcher, name: str, value: str, instead: str
) -> None:
    program = "try:\n    init()\nexcept Exception as error:\n    sys.exit(str(error))"
    status, err = run(launcher, 2, program, **{name: value})
    assert status == 1
    for rank in range(2):
        (line,) = [line for line in err.splitlines() if line.startswith(f"[{rank}]<stderr>:")]
        assert name in line and value.lower() in line.lower() and instead in line and "nset it" in line
