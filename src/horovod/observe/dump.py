"""The file that a rank writes when something is wrong: its schema, writing and reading.

Ranks write these files (:mod:`horovod.core.lifecycle.dumping`), and :mod:`horovod.diagnose` reads them. ``docs/diagnose.md``
documents the fields, for tools. A field is never renamed or removed while :data:`SCHEMA` stays the same; new ones may come.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from horovod._base import whole_file
from horovod.observe.threads import ThreadState

SCHEMA = 1


class TensorRecord(msgspec.Struct, frozen=True):
    """One tensor of a collective."""

    name: str
    dtype: str
    shape: list[int]


class CollectiveRecord(msgspec.Struct, frozen=True):
    """One collective on one rank.

    Times are of the rank's ``time.monotonic``, in seconds; null: not yet.

    Attributes:
        process_set: the number of its process set.
        number: the position among the collectives that this rank has submitted on the set, from 1.
        occurrence: the position among the collectives of this name, from 1.
        order: the position among the collectives that the set has carried out, the same on all ranks; 0: not carried out yet.
        operation: ``ALLREDUCE`` and so on.
        bytes: the bytes that this rank contributes, or that it receives if it contributes nothing.
        call_site: the user's line, ``file:line``.
        submitted: when the script submitted it.
        agreed: when this rank heard that all ranks have submitted it.
        started, ended: when this rank began and ended to carry it out.
        engine: the engine that carried it out.
        error: why it failed; "" if it did not.
    """

    process_set: int
    number: int
    occurrence: int
    order: int
    name: str
    operation: str
    tensors: list[TensorRecord]
    bytes: int
    call_site: str
    submitted: float
    agreed: float | None
    started: float | None
    ended: float | None
    engine: str
    error: str

    @property
    def state(self) -> str:
        """``submitted``, ``running``, ``done`` or ``failed``."""
        if self.ended is not None:
            return "failed" if self.error else "done"
        return "running" if self.order else "submitted"


class ProcessSetState(msgspec.Struct, frozen=True):
    """A process set that the rank belongs to.

    Attributes:
        ranks: its members' global ranks.
        engine: the engine that moves data in host memory.
        submitted, carried_out: the numbers of collectives, including those that the recorder has dropped.
    """

    id: int
    ranks: list[int]
    engine: str
    submitted: int
    carried_out: int


class NoProgressReport(msgspec.Struct, frozen=True):
    """This rank has seen no progress of ``rank`` inside a collective.

    Attributes:
        at: when it last saw this, by ``time.monotonic``.
    """

    rank: int
    reason: str
    at: float


class RankDump(msgspec.Struct, frozen=True):
    """The contents of one rank's file.

    Attributes:
        why: ``failure``, ``mismatch``, ``stall`` or ``request``.
        reason: why the rank wrote the file, as text.
        failed_rank: with ``failure``, the rank that failed first; -1 otherwise.
        failure_kind: the kind of the failure: ``LOST``, ``RAISED``, ``TIME_LIMIT`` or ``ENGINE``.
        monotonic, unix: the same moment by ``time.monotonic`` and ``time.time``: when the rank began to write.
        boot: identifies the running system. Ranks of the same system share one clock.
        hosts: by rank, the name of its host.
        neighbours: by rank on the same host, why its process cannot answer; "" if it runs.
        no_progress: the reports of the engine about ranks without progress.
        killed_for_memory: the number of processes that the system killed since ``init()`` for lack of memory; -1: not known.
        collectives: oldest first.
        threads: the main thread first.
        exception: the exception of the script that ends this rank; "" if there is none.
        lost: the ranks that an elastic job has gone on without, as text; the latest.
    """

    schema: int
    version: str
    job: str
    generation: int
    rank: int
    size: int
    host: str
    pid: int
    why: str
    reason: str
    failed_rank: int
    failure_kind: str
    monotonic: float
    unix: float
    boot: str
    hosts: list[str]
    process_sets: list[ProcessSetState]
    collectives: list[CollectiveRecord]
    threads: list[ThreadState]
    neighbours: dict[int, str] = {}
    no_progress: list[NoProgressReport] = []
    killed_for_memory: int = -1
    exception: str = ""
    lost: list[str] = []


class RankExit(msgspec.Struct, frozen=True):
    """How a rank's process ended."""

    rank: int
    code: int
    signal: int = 0
    host: str = ""


class LauncherDump(msgspec.Struct, frozen=True):
    """The launcher's file beside those of the ranks: how processes ended, in the order of their ends.

    Attributes:
        first: the rank that failed first, as far as the launcher knows; -1 if none is known.
    """

    schema: int
    job: str
    first: int
    reason: str
    exits: list[RankExit]


LAUNCHER_FILE = "launcher.json"


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.json"


def stacks_file(rank: int) -> str:
    """The name of the file with the stacks of a rank that could not write its own, as text; another rank writes it."""
    return f"rank-{rank}.stacks"


class DumpError(Exception):
    """A folder or a file that cannot be used. The message says why."""


def default_folder(job: str) -> Path:
    """The folder in which the ranks of a job write by default, on each host."""
    return Path(tempfile.gettempdir()) / f"horovod-{os.getuid()}" / job


def make_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, unless it exists.

    Raises:
        DumpError: it cannot be made; or it is in the default folder, and that is another user's, open to others, or a link.
    """
    own = folder.parent
    try:
        if own.name == f"horovod-{os.getuid()}":
            with contextlib.suppress(FileExistsError):
                own.mkdir(mode=0o700, parents=True)
            found = own.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise DumpError(f"{own} is not a folder of this user: nothing is written there. Remove it")
            if found.st_mode & 0o077:
                raise DumpError(f"{own} is open to other users: nothing is written there. Remove it, or `chmod 700` it")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DumpError(f"{folder} cannot be made: {error.strerror}") from error


def write(path: Path, content: bytes) -> None:
    """Write a file that appears in one step.

    Raises:
        DumpError: it cannot be written.
    """
    try:
        whole_file.write(path, content)
    except OSError as error:
        raise DumpError(f"{path} cannot be written: {error.strerror}") from error


encode = msgspec.json.Encoder().encode
_decode_rank = msgspec.json.Decoder(RankDump).decode
_decode_launcher = msgspec.json.Decoder(LauncherDump).decode


class Folder(msgspec.Struct, frozen=True):
    """Everything that was written to one folder.

    Attributes:
        ranks: by rank, the files of the latest generation of the job.
        stacks: by rank, the stacks of ranks that could not write their own.
        launcher: None if no launcher has written there.
    """

    ranks: dict[int, RankDump]
    stacks: dict[int, str]
    launcher: LauncherDump | None


def read(folders: Sequence[Path]) -> Folder:
    """Read the folders of one job, such as one of each host.

    Raises:
        DumpError: there is nothing to read, or a file is invalid.
    """
    found: dict[int, RankDump] = {}
    stacks: dict[int, str] = {}
    launcher: LauncherDump | None = None
    for folder in folders:
        if not folder.is_dir():
            raise DumpError(f"there is no folder {folder}")
        for path in sorted(folder.iterdir()):
            try:
                if path.name == LAUNCHER_FILE:
                    launcher = _decode_launcher(path.read_bytes())
                elif path.name.startswith("rank-") and path.suffix == ".json":
                    dump = _decode_rank(path.read_bytes())
                    known = found.get(dump.rank)
                    if known is None or (known.unix, known.generation) < (dump.unix, dump.generation):
                        found[dump.rank] = dump
                elif path.name.startswith("rank-") and path.suffix == ".stacks":
                    stacks[int(path.stem.removeprefix("rank-"))] = path.read_text(errors="replace")
            except (msgspec.DecodeError, ValueError) as error:
                raise DumpError(f"{path} is not what a rank of this version writes: {error}") from error
            except OSError as error:
                raise DumpError(f"{path} cannot be read: {error.strerror}") from error
    if not found and launcher is None:
        raise DumpError(f"no rank has written to {', '.join(map(str, folders))}")
    latest = max(found.values(), key=lambda dump: dump.unix, default=None)
    ranks = {
        rank: dump
        for rank, dump in sorted(found.items())
        if latest is not None and (dump.job, dump.generation) == (latest.job, latest.generation)
    }
    return Folder(ranks, stacks, launcher)
