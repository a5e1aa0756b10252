"""Agents on the nodes of an allocation through srun: a step of one task for each node, overlapping all others.

No ssh is needed. The command line names the interpreter. The job's secret is neither on the command line nor in the
environment: the launcher sends it on standard input.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from horovod._base import config
from horovod.runner.reach.child_connection import ChildConnection

AGENT = "import sys; sys.path = [entry for entry in sys.path if entry]; from horovod.runner.agent.program import main; main()"
_KEPT = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_WORKING_CLUSTER", "SLURM_JWT")
_OF_THIS_NODE = re.compile(rf"SLURM.*|SRUN_.*|PMI.*|BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|{config.SECRET_KEY}")
_CANCELLED = re.compile(r"\*\*\* ((?:JOB|STEP) \S+ ON \S+ CANCELLED AT .*?) \*\*\*")
_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    (r"no module named '?horovod", "Horovod is not installed for its Python"),
    (r"no module named '?([\w.]+)", "a package that Horovod needs is not installed there"),
    (r"no such file or directory", "the launcher's interpreter does not exist there"),
    (r"requested nodes are busy|temporarily unavailable", "its share of the allocation is in use by another step"),
    (r"job/step already completing|invalid job id|expired", "the allocation is over"),
    (r"node failure|not responding|communication connection failure", "Slurm cannot reach it"),
)  # fmt: skip


def command_line(node: str, cpus: int, python: str) -> list[str]:
    """The command that starts an agent.

    Args:
        node: Slurm's name of the node.
        cpus: how many CPUs of the node the allocation has.
        python: the launcher's interpreter.
    """
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        f"--cpus-per-task={cpus}",
        "--overlap",  # it shares the node with all steps, and with the shell that the launcher runs in
        "--cpu-bind=none",
        "--unbuffered",  # else Slurm holds output back until the end of a line, and messages have no lines
        "--mpi=none",
        "--chdir=/",
        "--quiet",
        python,
        "-c",
        AGENT,
    ]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun, which passes it on to the agents: the launcher's, without variables about its own node or step.

    srun would read those variables as options.
    """
    kept = {name: own[name] for name in _KEPT if name in own}
    return {name: value for name, value in own.items() if _OF_THIS_NODE.fullmatch(name) is None} | kept


class Srun(ChildConnection):
    """A running srun."""

    def say_why(self, status: int, errors: str, preamble: str) -> str:
        return explain(status, errors)


def explain(status: int, errors: str) -> str:
    """Why srun, or the agent behind it, ended. Pure.

    Args:
        status: srun's exit status.
        errors: the text that it wrote to standard error.
    """
    cancelled = _CANCELLED.search(errors)
    if cancelled:
        return f"Slurm ended it: {cancelled[1]}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, explanation in _EXPLANATIONS:
        line = next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), "")
        if line:
            return f"{explanation} ({line})"
    if status < 0:
        return f"srun was killed by {signal.Signals(-status).name}"
    said = [line for line in lines if not re.match(r"srun: (?:error: .* task 0: |Terminating|launch/slurm)", line)]
    last = (said or lines or [""])[-1]
    return f"srun, or the agent that it started, ended with exit status {status}" + (f": {last}" if last else "")
