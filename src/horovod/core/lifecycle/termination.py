"""The end of a generation: the one error with which everything in flight and everything later fails, on every rank.

Either a rank has failed (:meth:`Termination.fail`, on the liveness monitor's thread, after rank 0's decision), or one has shut
down (:meth:`Termination.left`, on a worker thread). The rank that failed first is reported to the launcher, so that its exit
code and its message name that rank, and not one that failed as a consequence.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from horovod.comm.mpi import runtime as mpi
from horovod.control.failure import LOST, Cause, FailureKind
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer, Rendezvous
from horovod.core.errors import (
    CollectiveTimeoutError,
    EngineFailureError,
    HorovodInternalError,
    RankLostError,
    RankRaisedError,
    shut_down_by,
)
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.rank_exchange import RankInfo
from horovod.core.lifecycle.standing import Messages
from horovod.core.worker.worker import WorkerThread, still_in_use

_log = logging.getLogger("horovod.core")

_TELLING_SECONDS = 2.0
"""How long the launcher may take to answer."""

FAILURE_KEY = "failure"
"""The key in the rendezvous server under which the launcher finds the rank that failed first."""

_KINDS: Mapping[FailureKind, type[HorovodInternalError]] = {
    FailureKind.LOST: RankLostError,
    FailureKind.RAISED: RankRaisedError,
    FailureKind.TIME_LIMIT: CollectiveTimeoutError,
    FailureKind.ENGINE: EngineFailureError,
}


class Companion(Protocol):
    """A binding's addition to a generation, which ends with it."""

    def fail(self, error: HorovodInternalError, orderly: bool) -> None:
        """``error`` has ended the generation: fail what is running, once no thread uses its memory any more. Any thread.

        Args:
            orderly: a rank has shut down; otherwise one has failed.
        """

    def messages(self) -> Messages | None:
        """What ranks have not sent or received yet; None if something may happen without a call of a script. Any thread."""

    def close(self) -> None:
        """Release everything, and end all threads. Called once."""

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""


class Termination:
    """The end of one generation: whether and how it has ended.

    Args:
        rank: this rank.
        workers: by process set id; they fail together.
        seconds: how long their threads may take to leave collectives that are interrupted.

    Attributes:
        error: the error of all further submissions; None while the generation runs.
        failure: the same error if a rank has failed; None while the generation runs, and after an orderly end.
        failed: set once everything in flight has failed and the launcher knows of it.
        point: the rendezvous server; None if the job has none. If the launcher runs it, failures are reported there.
        rank_infos: by rank, the information of all ranks; empty until it is known.
        write_down: makes this rank write its flight recorder, before anything fails.
        companions: the bindings' additions, which fail with the generation.
    """

    def __init__(self, rank: int, workers: Mapping[int, WorkerThread], seconds: float) -> None:
        self._rank = rank
        self._workers = workers
        self._leaver: tuple[int, str] | None = None
        self._seconds = seconds
        self.error: HorovodInternalError | None = None
        self.failure: HorovodInternalError | None = None
        self.failed = threading.Event()
        self.point: Rendezvous | None = None
        self.rank_infos: Sequence[RankInfo] = ()
        self.write_down: Callable[[int, str, Cause], None] = lambda rank, reason, cause: None
        self.companions: list[Companion] = []

    def fail(self, rank: int, reason: str, cause: Cause = LOST) -> None:
        """Fail everything in flight, because ``rank`` failed first, as soon as all threads have left all tensors. The report to
        the launcher comes last, usually while the script continues. The process does not end before that, because
        ``shutdown()`` waits for the thread that this runs on.
        """
        self.write_down(rank, reason, cause)
        self.failure = self.error = _KINDS[cause.kind](
            f"Horovod: {self.describe(rank)} failed: {reason.rstrip('.')}. Every collective of this job has ended with this "
            "error, on all ranks.",
            ranks=[rank],
            tensor=cause.tensor,
            call_sites=cause.call_sites,
            reason=reason,
        )
        mpi.failed.set()
        workers = list(self._workers.values())  # a thread that adds a process set now will see the failure itself
        for worker in workers:
            worker.interrupt()
        deadline = time.monotonic() + self._seconds
        used = [worker.await_exit(deadline - time.monotonic()) for worker in workers]
        if any(used):
            self.failure = self.error = still_in_use(self.failure, next(filter(None, used)))
            _log.error("rank %d: %s", self._rank, self.failure)
        process = elastic_process.this_process()
        if process is not None:
            process.interrupted = oldest_collective(workers)
        for worker in workers:
            worker.fail(self.failure)
        for companion in list(self.companions):
            companion.fail(self.failure, orderly=False)
        if self._rank in (0, rank) or rank == 0:
            self._tell_launcher(rank, reason, own=cause.kind is FailureKind.RAISED)
        self.failed.set()

    def about_to_fail(self, seconds: float, reason: str) -> HorovodInternalError:
        """The error of the job, for a thread that sees an effect of it first. If none comes within ``seconds``, the error is
        ``reason``, which says what the thread has seen."""
        if self.failure is None:
            self.failed.wait(seconds)
        failure = self.failure
        return HorovodInternalError(reason) if failure is None else failure.again()

    def left(self, rank: int, reason: str, interrupted: bool) -> None:
        """Note that ``rank`` has shut down; ``interrupted``: this rank was still waiting for a collective."""
        if interrupted and rank != self._rank and elastic_process.this_process() is None:
            self._tell_launcher(rank, reason)
        if interrupted:
            self.write_down(rank, reason, LOST)
        if self.error is None:
            self._leaver = (rank, reason)
            self.error = shut_down_by(rank, reason)
            for companion in list(self.companions):
                companion.fail(self.error, orderly=True)

    def cannot_begin(self, rank: int, reason: str) -> str:
        """Report that the job ends before it has begun, because of ``rank`` or its host. Every rank may; the first counts.

        Returns:
            The reason that was reported first; ``reason`` if that is not known.
        """
        if elastic_process.this_process() is not None:
            return reason  # the launcher is told when the round could not begin
        return self._tell_launcher(rank, reason)

    def blame_leaver(self) -> None:
        """Tell the launcher that this process ends because another rank has left."""
        elastic = elastic_process.this_process() is not None  # the launcher itself sees which ranks leave, and how
        if self._leaver is not None and self._leaver[0] != self._rank and not elastic:
            self._tell_launcher(*self._leaver)

    def ended_by(self, reason: str, own: bool) -> None:
        """Tell the launcher that an error ends this process: its ``own``, or one that other ranks raise, too, such as a
        mismatch. Called before this rank leaves, so that no other rank reports first that it has left."""
        if elastic_process.this_process() is None:
            self._tell_launcher(self._rank, reason, own)

    def _launched(self, rank: int) -> int:
        return self.rank_infos[rank].launched if rank < len(self.rank_infos) else rank

    def describe(self, rank: int) -> str:
        """A rank's number, host and process, for messages."""
        text = f"rank {rank}"
        if rank < len(self.rank_infos):
            endpoint, launched = self.rank_infos[rank].endpoint, self._launched(rank)
            text += f" (host {endpoint.host}, process {endpoint.pid}"
            text += ")" if launched == rank else f", rank {launched} of the launched job)"
        return text

    def _tell_launcher(self, rank: int, reason: str, own: bool = False) -> str:
        """Report which rank failed first, and why. Returns the reason that was reported first, if the launcher says it."""
        process = elastic_process.this_process()
        if process is not None:
            process.failed(rank, reason)
            return reason
        if not isinstance(self.point, LauncherServer):
            return reason
        report = json.dumps({"rank": self._launched(rank), "reason": reason, "own": own}).encode()
        try:
            with RendezvousClient(self.point.address, self.point.secret, _TELLING_SECONDS) as client:
                client.put(FAILURE_KEY, report, only_first=True, timeout=_TELLING_SECONDS)
                return str(json.loads(client.get(FAILURE_KEY, _TELLING_SECONDS))["reason"])
        except (RendezvousError, OSError) as error:
            _log.debug("this rank could not tell the launcher which rank failed first: %s", error)
            return reason


def oldest_collective(workers: Sequence[WorkerThread]) -> str:
    """The operation and the name of the oldest collective in flight, of all process sets; "" if there is none."""
    entries = [entry for worker in workers for entry in worker.entries()]
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: entry.since).request
    operation = oldest.operation.name.lower()
    return f"{operation} {oldest.name.removeprefix(f'{operation}.')!r}"


class NoPeers:
    """The watch of a job of one rank, which has no peers to lose."""

    def __init__(self, termination: Termination) -> None:
        self.call_sites: dict[int, str] = {}
        self.thread_lines: dict[int, list[str]] = {}
        self.awaited: dict[int, list[str]] = {}
        self._termination = termination

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause = LOST) -> None:
        self._termination.fail(rank, reason, cause)

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        pass

    def probe(self) -> None:
        pass

    def request_dump(self, why: str, reason: str) -> None:
        pass

    def disagreed(self, reason: str) -> None:
        pass
