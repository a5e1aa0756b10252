"""How a generation ended: the one error with which everything pending and everything later fails, on every rank.

Either a rank failed (:meth:`Termination.fail`, on the liveness monitor's thread, with rank 0's verdict) or one left in
good order (:meth:`Termination.left`, on a worker thread). The launcher is told who failed, so that its exit code and
its words name the guilty rank and not a victim.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from horovod.control.meeting_at_rank_0 import PlaceAtRank0
from horovod.control.meeting_on_hosts import PlaceOnHosts
from horovod.control.rendezvous import RendezvousError
from horovod.control.rendezvous_client import RendezvousClient
from horovod.control.rendezvous_point import RendezvousPoint
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.execution.worker import WorkerThread, still_in_use
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.rendezvous import RankInfo

_log = logging.getLogger("horovod.core")

FAILURE_KEY = "failure"
"""Where the launcher's store learns which rank failed first."""


class Termination:
    """What is known about the end of one generation.

    Args:
        rank: this rank.
        worker threads: by process set id; failed together.
        seconds: how long their threads may take to leave the tensors of collectives that are interrupted.

    Attributes:
        error: why nothing can be submitted any more, or None while the generation runs.
        verdict: the same, if a rank has failed; None also after an orderly end.
        failed: set once a failure has been carried out.
        place: where ranks meet; the launcher listens there if it is the launcher's.
        introductions: of all ranks, by rank, as far as they are known.
    """

    def __init__(self, rank: int, workers: Mapping[int, WorkerThread], seconds: float) -> None:
        self._rank = rank
        self._workers = workers
        self._leaver: tuple[int, str] | None = None
        self._seconds = seconds
        self.error: HorovodInternalError | None = None
        self.failure: HorovodInternalError | None = None
        self.failed = threading.Event()
        self.place: RendezvousPoint | PlaceOnHosts | PlaceAtRank0 | None = None
        self.rank_infos: Sequence[RankInfo] = ()

    def fail(self, rank: int, reason: str) -> None:
        """The verdict: ``rank`` failed first. Fails everything pending, once no thread uses a tensor of any process set.

        The launcher is told last, and mostly while the script runs on: this process does not end before, since
        ``shutdown()`` waits for the thread that this runs on.
        """
        self.failure = self.error = HorovodInternalError(
            f"Horovod: {self.who(rank)} failed: {reason.rstrip('.')}. Every collective of this job has ended with this "
            "error, on all ranks."
        )
        workers = list(
            self._workers.values()
        )  # another thread may be adding a process set, which then looks for a failure
        for worker in workers:
            worker.interrupt()
        deadline = time.monotonic() + self._seconds
        stuck = [worker for worker in workers if not worker.await_exit(deadline - time.monotonic())]
        if stuck:
            self.failure = self.error = still_in_use(self.failure)
            _log.error("rank %d: %s", self._rank, self.failure)
        for worker in workers:
            worker.fail(self.failure)
        if self._rank in (0, rank) or rank == 0:
            self._tell_launcher(rank, reason)
        self.failed.set()

    def left(self, rank: int, reason: str, interrupted: bool) -> None:
        """``rank`` has shut down; ``interrupted`` if this rank still waited for something."""
        if interrupted and rank != self._rank and elastic_process.this_process() is None:
            self._tell_launcher(rank, reason)
        if self.error is None:
            self._leaver = (rank, reason)
            self.error = HorovodInternalError(f"{SHUT_DOWN} This was caused by rank {rank}: {reason}.")

    def cannot_begin(self, rank: int, reason: str) -> None:
        """The job ends before it has begun, because of ``rank`` or its host. Every rank may say so; the first is heard."""
        self._tell_launcher(rank, reason)

    def blame_leaver(self) -> None:
        """This process ends because somebody left while it went on: whoever looks for the cause should look there."""
        elastic = elastic_process.this_process() is not None  # its launcher sees by itself who leaves, and how
        if self._leaver is not None and self._leaver[0] != self._rank and not elastic:
            self._tell_launcher(*self._leaver)

    def _launched(self, rank: int) -> int:
        return self.rank_infos[rank].launched if rank < len(self.rank_infos) else rank

    def who(self, rank: int) -> str:
        """A rank's number, host and process."""
        text = f"rank {rank}"
        if rank < len(self.rank_infos):
            endpoint, launched = self.rank_infos[rank].endpoint, self._launched(rank)
            text += f" (host {endpoint.host}, process {endpoint.pid}"
            text += ")" if launched == rank else f", rank {launched} of the launched job)"
        return text

    def _tell_launcher(self, rank: int, reason: str) -> None:
        process = elastic_process.this_process()
        if process is not None:
            process.failed(rank, reason)
            return
        if self.place is None or self.place.hosted:
            return
        try:
            with RendezvousClient(self.place.address, self.place.secret, 2.0) as client:
                reported_failure = json.dumps({"rank": self._launched(rank), "reason": reason}).encode()
                client.put(FAILURE_KEY, reported_failure, only_first=True, timeout=2.0)
        except (RendezvousError, OSError) as error:
            _log.debug("the launcher could not be told which rank failed first: %s", error)


class NobodyElse:
    """The watch of a job of one: there is nobody to lose."""

    def __init__(self, termination: Termination) -> None:
        self.call_sites: dict[int, str] = {}
        self._ending = termination

    def report(self, rank: int, reason: str, suspected: bool = False) -> None:
        self._ending.fail(rank, reason)

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        pass

    def probe(self) -> None:
        pass
