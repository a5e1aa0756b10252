"""The launcher's part in flight recorders: it chooses their folder, forwards requests, and adds how processes ended.

A request is SIGURG: ``horovodrun --dump`` sends it to a launcher, which forwards it to all ranks of all hosts, or to a rank,
which asks the others.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from horovod._base import config
from horovod.observe import dump
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.output.outcome import Outcome

SIGNAL = signal.SIGURG
_SECONDS = 10.0
"""How long all ranks together may take to answer a request."""
_QUIET_SECONDS = 3.0
"""After this time without a new file, no more will come."""
_BATCH_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID")

_jobs = 0


def folder_of_new_job(environment: Mapping[str, str]) -> Path:
    """The folder in which the ranks of the next job of this process write: the user's, else a new one."""
    global _jobs
    asked = environment.get(config.FLIGHT_RECORDER_DIR, "").strip()
    if asked:
        return Path(asked).absolute()
    _jobs += 1
    return dump.default_folder(_name(os.getpid()) + (f"-{_jobs}" if _jobs > 1 else ""))


def _name(pid: int) -> str:
    return f"{socket.gethostname()}-{pid}"


def notice(folder: Path, outcome: Outcome, since: float, several_hosts: bool) -> str:
    """Add to the folder how the processes of a failed job ended. Returns the text that says where the folder is; "" if the
    ranks have written nothing.

    Args:
        folder: where the ranks write.
        outcome: how the job ended.
        since: when the job began, by ``time.time``.
        several_hosts: whether some ranks run on other hosts.
    """
    if not outcome.failed or not list(_written(folder, since)):
        return ""
    exits = [
        dump.RankExit(rank, end.code, end.signal) for rank, end in outcome.exits.items() if outcome.called == "rank"
    ]
    first = outcome.culprit if outcome.culprit is not None and outcome.called == "rank" else -1
    content = dump.LauncherDump(dump.SCHEMA, _name(os.getpid()), first, outcome.reason, exits)
    try:
        dump.write(folder / dump.LAUNCHER_FILE, dump.encode(content))
    except dump.DumpError:
        pass  # a full disk; the files of the ranks are there
    where = f"{folder}, on each host" if several_hosts else folder
    command = f"python -m horovod.diagnose {shlex.quote(str(folder))}"
    return f"horovodrun: what every rank did until the end is in {where}. To have it explained: {command}"


def _written(folder: Path, since: float) -> Iterator[Path]:
    """The ranks' files that are no older than ``since``."""
    try:
        files = list(folder.glob("rank-*.json"))
    except OSError:
        return
    for path in files:
        try:
            if path.stat().st_mtime >= since - 1.0:
                yield path
        except OSError:
            pass  # it is being replaced


def request(target: str) -> Path:
    """Have all ranks of a running job write their flight recorders, and wait until they have.

    Args:
        target: the process id of ``horovodrun`` or of a rank, or the number of a batch job, on this host.

    Returns:
        The folder that they have written to.

    Raises:
        ValueError: there is no such job.
        LaunchError: no rank has answered.
    """
    pid = _process(target)
    since = time.time()
    candidates = _folders(pid)
    os.kill(pid, SIGNAL)
    deadline, found, quiet = time.monotonic() + _SECONDS, 0, time.monotonic() + _QUIET_SECONDS
    folder: Path | None = None
    while time.monotonic() < min(deadline, quiet):
        time.sleep(0.1)
        folder = folder or next((each for each in candidates if list(_written(each, since + 1.0))), None)
        if folder is None:
            continue
        written = list(_written(folder, since + 1.0))
        if len(written) > found:
            found, quiet = len(written), time.monotonic() + _QUIET_SECONDS
        if len(written) >= _size(written[0]):
            break
    if folder is None:
        where = ", ".join(map(str, candidates))
        raise LaunchError(f"no rank of process {pid} has written anything to {where} within {_QUIET_SECONDS:g} seconds")
    return folder


def _size(path: Path) -> int:
    try:
        return max(dump.read([path.parent]).ranks.values(), key=lambda each: each.unix).size
    except (dump.DumpError, ValueError):
        return 1 << 30  # it is not complete


def _folders(pid: int) -> list[Path]:
    """The folders in which the ranks of a process may write."""
    environment = _environment(pid)
    asked = environment.get(config.FLIGHT_RECORDER_DIR, "").strip()
    if asked:
        directory = Path(f"/proc/{pid}/cwd").readlink()
        return [directory / asked]
    root = Path(environment.get("TMPDIR") or tempfile.gettempdir()) / f"horovod-{os.getuid()}"
    own = root / _name(pid)
    return [own, *(each for each in _listed(root) if each != own)]


def _listed(root: Path) -> list[Path]:
    try:
        return sorted(each for each in root.iterdir() if each.is_dir())
    except OSError:
        return []


def _process(target: str) -> int:
    if not target.isdecimal():
        raise UsageError(f"--dump takes a process id or the number of a batch job, not {target!r}")
    if _answers(int(target)):
        return int(target)
    of_job = [pid for pid in _own_processes() if _answers(pid) and _is_of(pid, target)]
    if not of_job:
        raise UsageError(
            f"neither horovodrun nor a rank of a job runs on this host as process {target}, or in batch job {target}, as this "
            "user"
        )
    launchers = [
        pid for pid in of_job if any(name in _command(pid) for name in ("horovodrun", "horovod.runner.launch"))
    ]
    return min(launchers or of_job)


def _is_of(pid: int, job: str) -> bool:
    environment = _environment(pid)
    return any(environment.get(name, "").partition(".")[0] == job for name in _BATCH_VARIABLES)


def _own_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if entry.stat().st_uid == os.getuid():
                    yield int(entry.name)
            except OSError:
                pass  # it has ended


def _answers(pid: int) -> bool:
    """Whether a process handles the signal. The signal does no harm to a process that does not."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) & 1 << (SIGNAL - 1)) and os.access(f"/proc/{pid}/environ", os.R_OK)
    except OSError:
        pass
    return False


def _environment(pid: int) -> dict[str, str]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
