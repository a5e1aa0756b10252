"""Writes the flight recorder and the stacks of this rank when something is wrong: on all ranks at the same time.

A rank writes on a failure, before anything in flight fails; when rank 0 reports a stall; and when it is asked: by SIGURG, or
because another rank was asked. A thread of its own writes, so that a slow or full disk delays nothing else. It sleeps in one
``poll``.

A rank that cannot write, because native code keeps its interpreter, has the stack of its main thread written by the next rank
on its host.
"""

from __future__ import annotations

import logging
import math
import os
import select
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from horovod._base.config import Config
from horovod._base.version import VERSION
from horovod.control.failure import Cause
from horovod.control.wakeup import WakeUp
from horovod.core.lifecycle import crash
from horovod.core.negotiation.messages import Request
from horovod.core.worker.worker import WorkerThread
from horovod.observe import dump, host_system, threads
from horovod.observe.flight_recorder import Record
from horovod.observe.native_stacks import NativeStacks, stack_of

_log = logging.getLogger("horovod.core")

FAILURE, STALL, REQUEST = "failure", "stall", "request"
"""Why a rank writes; the fourth reason, ``mismatch``, comes from a worker."""

_AGAIN_SECONDS = 1.0
"""A second request of the same kind within this time counts as the same request, received twice."""
_ANSWER_SECONDS = 1.0
"""How long a neighbour may take to write before this rank reads its stacks from outside."""
_LAST_SECONDS = 3.0
"""How long the end of a generation waits for what is being written."""


class Members(msgspec.Struct, frozen=True):
    """The ranks of the job as a dump shows them.

    Attributes:
        job: identifies the job in all of its generations.
        folder: the default name of the folder to write to.
        hosts: by rank.
        neighbours: by rank, the ids of other ranks' processes that this process can inspect.
        launched: whether ``horovodrun`` started the job; it then tells the user where the files are.
        lost: the ranks that an elastic job has gone on without.
    """

    job: str
    folder: str
    generation: int
    rank: int
    hosts: list[str]
    neighbours: dict[int, int]
    launched: bool
    lost: list[str]


class Dumper:
    """Writes the dumps of one generation. Any thread may call its methods.

    Args:
        workers: by process set id.
        look: says why a rank's process cannot answer, "" if it runs.
        ask_all: makes all ranks write; called when this rank gets the signal.
        no_progress: by rank, what this rank's engine has reported about it, and since when.
    """

    def __init__(
        self,
        config: Config,
        members: Members,
        workers: Mapping[int, WorkerThread],
        look: Callable[[int], str | None],
        ask_all: Callable[[str, str], None],
        no_progress: Callable[[], Mapping[int, tuple[str, float]]],
    ) -> None:
        self._members = members
        self._workers = workers
        self._look = look
        self._ask_all = ask_all
        self._no_progress = no_progress
        self._folder = Path(config.flight_recorder_dir or dump.default_folder(members.folder))
        self._memory = host_system.processes_killed()
        self._requests: deque[tuple[str, str, float]] = deque()  # with the time at which it came
        self._captured: deque[dump.RankDump] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._last: dict[str, float] = {}
        self._failed = self._leaving = False
        self._wake_up = WakeUp()
        self._stacks = _native_stacks()
        self._thread = threading.Thread(target=self._serve, name="horovod-recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self, why: str, reason: str) -> None:
        """Make this rank write its file soon."""
        self._requests.append((why, reason, time.monotonic()))
        self._wake_up.set()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the thread of the dumper. It must not wait."""
        self._calls.append(call)
        self._wake_up.set()

    def failed(self, rank: int, reason: str, cause: Cause) -> None:
        """Record the present state for the thread that writes it. ``rank`` has failed first."""
        self._failed = True
        self._captured.append(self._capture(FAILURE, reason, rank, cause.kind.name))
        self._wake_up.set()

    def close(self) -> None:
        """Write the pending dumps within some seconds, and end the thread."""
        self._leaving = True
        self._wake_up.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_SECONDS)
        if not self._thread.is_alive():  # else a disk does not answer, and the thread uses them
            if self._stacks is not None:
                self._stacks.close()
            self._wake_up.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [*self._wake_up.descriptors(), *(self._stacks.descriptors() if self._stacks is not None else [])]

    def abandon(self) -> None:
        """In a forked child: leave the parent's file alone."""
        if self._stacks is not None:
            self._stacks.abandon()

    # On the thread.

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        if self._stacks is not None:
            poll.register(self._stacks, select.POLLIN)
        while True:
            leaving = self._leaving
            try:
                while self._captured:
                    self._write(self._captured.popleft())
                while self._requests:
                    self._answer(*self._requests.popleft())
                while self._calls:
                    self._calls.popleft()()
            except Exception:  # a bug here must not end a job that may still recover
                _log.exception("rank %d: the flight recorder could not be written", self._members.rank)
            if leaving:
                return
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_up.fileno():
                    self._wake_up.clear()
                elif self._stacks is not None:
                    self._stacks.take()
                    now = time.monotonic()
                    if self._is_new(REQUEST, now):
                        self._requests.append((REQUEST, "asked by a signal", now))
                        self._ask_all(REQUEST, f"rank {self._members.rank} was asked by a signal")

    def _is_new(self, why: str, came: float) -> bool:
        return came - self._last.get(why, -math.inf) >= _AGAIN_SECONDS

    def _answer(self, why: str, reason: str, came: float) -> None:
        if not self._failed and self._is_new(why, came):  # after a failure, nothing is where it was any more
            self._write(self._capture(why, reason))

    def _write(self, content: dump.RankDump) -> None:
        """Write a dump, and the stacks of neighbours that cannot write their own."""
        with_code = msgspec.structs.replace(content, threads=threads.with_code(content.threads))
        own = self._folder / dump.rank_file(content.rank)
        try:
            dump.make_folder(self._folder)
            dump.write(own, dump.encode(with_code))
        except dump.DumpError as error:
            _log.error("rank %d: %s, so this rank's flight recorder is not saved", content.rank, error)
            return
        speaker = 1 if content.failed_rank == 0 else 0
        if content.rank == speaker and (
            content.why == STALL or (content.why == FAILURE and not self._members.launched)
        ):
            where = "" if len(set(content.hosts)) == 1 else " on its host"
            _log.warning(
                "every rank has written its flight recorder to %s%s; to interpret them: python -m horovod.diagnose %s",
                self._folder,
                where,
                shlex.quote(str(self._folder)),
            )
        self._look_after_neighbours(content)

    def _look_after_neighbours(self, content: dump.RankDump) -> None:
        """Write the stacks of the next ranks on this host that do not write them in time."""
        neighbours = self._members.neighbours
        later = sorted(neighbours, key=lambda rank: (rank < content.rank, rank))
        for rank in later:
            if self._writes(rank, content.unix):
                return  # it looks after the others
            if self._look(rank) != "":
                continue  # it has ended or is stopped
            text = stack_of(neighbours[rank], _ANSWER_SECONDS)
            if text:
                dump.write(self._folder / dump.stacks_file(rank), text.encode())

    def _writes(self, rank: int, since: float) -> bool:
        """Whether a rank writes its file in time."""
        path = self._folder / dump.rank_file(rank)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                if path.stat().st_mtime > since - _ANSWER_SECONDS:
                    return True
            except OSError:
                pass  # not yet
            if time.monotonic() >= deadline or self._leaving or self._look(rank) != "":
                return False
            time.sleep(0.05)

    # What is written.

    def _capture(self, why: str, reason: str, failed_rank: int = -1, kind: str = "") -> dump.RankDump:
        members = self._members
        self._last[why] = time.monotonic()
        workers = sorted(self._workers.items())
        killed = host_system.processes_killed()
        return dump.RankDump(
            schema=dump.SCHEMA,
            version=VERSION,
            job=members.job,
            generation=members.generation,
            rank=members.rank,
            size=len(members.hosts),
            host=members.hosts[members.rank],
            pid=os.getpid(),
            why=why,
            reason=reason,
            failed_rank=failed_rank,
            failure_kind=kind,
            monotonic=time.monotonic(),
            unix=time.time(),
            boot=host_system.boot_id(),
            hosts=members.hosts,
            process_sets=[_set_state(number, worker) for number, worker in workers],
            collectives=[
                _collective(number, record)
                for number, worker in workers
                if worker.recorder is not None
                for record in worker.recorder.ring.copy()
            ],
            threads=threads.states(),
            neighbours={rank: self._look(rank) or "" for rank in members.neighbours},
            no_progress=[dump.NoProgressReport(rank, *found) for rank, found in sorted(self._no_progress().items())],
            killed_for_memory=-1 if killed < 0 or self._memory < 0 else killed - self._memory,
            exception=crash.unhandled(),
            lost=members.lost,
        )


def _native_stacks() -> NativeStacks | None:
    try:
        return NativeStacks()
    except OSError as error:
        _log.info("this process cannot write its flight recorder on a signal: %s", error)
        return None


def _set_state(number: int, worker: WorkerThread) -> dump.ProcessSetState:
    recorder = worker.recorder
    submitted, carried_out = (0, 0) if recorder is None else (recorder.count, recorder.carried_out)
    return dump.ProcessSetState(number, list(worker.ranks), worker.communicator.name, submitted, carried_out)


def _collective(process_set: int, record: Record) -> dump.CollectiveRecord:
    request: Request = record.request
    tensors = [dump.TensorRecord(each.name, each.data_type.label, list(each.shape)) for each in request.tensors]
    return dump.CollectiveRecord(
        process_set,
        record.number,
        record.occurrence,
        record.order,
        request.name,
        request.operation.name,
        tensors,
        request.nbytes,
        request.caller,
        record.submitted,
        record.agreed or None,
        record.started or None,
        record.ended or None,
        record.engine,
        record.error[:2000],
    )


def neighbours_of(rank: int, namespaces: Sequence[tuple[str, int]]) -> dict[int, int]:
    """By rank, the processes that ``rank`` can inspect.

    Args:
        namespaces: by rank, the process's namespace, and its process id there.
    """
    own = namespaces[rank][0]
    return {other: pid for other, (seen, pid) in enumerate(namespaces) if own and seen == own and other != rank}
