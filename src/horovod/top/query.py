"""Finds rank 0 of a running job on this host, and asks it what the job does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from horovod._base import config
from horovod.control.connection import is_same_user
from horovod.observe.live import JobSnapshot
from horovod.observe.live_address import ancestors, listening, names_of

_SECONDS = 5.0
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID")
_MEETING = (config.RENDEZVOUS_ADDRESS, config.RENDEZVOUS_PORT)
"""Ranks of one job have the same values of these."""
_decoder = msgspec.json.Decoder(JobSnapshot)


class QueryError(Exception):
    """There is no such job, or it does not answer. The message says what to do."""


class JobEnded(QueryError):
    """The job has ended."""


def rank_0_of(target: str | None) -> int:
    """The process of rank 0.

    Args:
        target: the process of ``horovodrun`` or of a rank, or the number of a batch job; None: the only job on this host.

    Raises:
        QueryError: there is no such job here, or there are several.
    """
    jobs = listening()
    shown = ", ".join(map(str, jobs)) or "none"
    advice = (
        "Ask on the host of rank 0, in its container if it has one, as the user who runs the job. Rank 0 must have called "
        f"init(). Processes of this user here that are rank 0 of a job: {shown}"
    )
    if target is None:
        if len(jobs) == 1:
            return jobs[0]
        raise QueryError(f"{'several jobs run' if jobs else 'no job runs'} here. {advice}")
    if not target.isdecimal():
        raise QueryError(f"expected the number of a process or of a batch job, not {target!r}")
    asked = _environment(int(target))
    for pid in jobs:
        theirs = _environment(pid)
        if (
            int(target) in ancestors(pid)
            or any(theirs.get(name, "").partition(".")[0] == target for name in _JOB_VARIABLES)
            or (asked.get(_MEETING[1]) and all(asked.get(name) == theirs.get(name) for name in _MEETING))
        ):
            return pid
    raise QueryError(f"no job has the process or batch number {target} here. {advice}")


def ask(pid: int) -> JobSnapshot:
    """The present state of a job.

    Args:
        pid: of rank 0.

    Raises:
        JobEnded, QueryError: it does not answer.
    """
    parts = []
    try:
        for name in names_of(pid):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_SECONDS)
                connection.connect(name)
                while is_same_user(connection) and (part := connection.recv(1 << 16)):
                    parts.append(part)
            if parts:
                break
    except (ConnectionRefusedError, ConnectionResetError):
        raise JobEnded("the job has ended") from None
    except OSError as error:
        raise QueryError(f"rank 0 (process {pid}) does not answer: {error}") from error
    try:
        return _decoder.decode(b"".join(parts))
    except msgspec.DecodeError as error:
        raise JobEnded(f"the job has ended while it answered ({error})") from error


def _environment(pid: int) -> dict[str, str]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(variable.split("=", 1) for variable in variables if "=" in variable) if pid != os.getpid() else {}
