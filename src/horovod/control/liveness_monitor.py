"""The liveness monitor: a thread on each rank that finds lost ranks, and makes all ranks name the same rank as the first to
fail.

Every rank has a connection to rank 0, or to the relays of its host (:mod:`horovod.control.liveness_tree`). Nothing is sent on
it while no rank waits, so an idle job costs nothing.

1. The kernel closes the connection when a process dies. A rank that sees this, or whose worker thread sees a failure, reports
   it to rank 0.
2. A rank that waits long pings the ranks above it, which ping those above them; rank 0, when pinged, pings all ranks. An answer
   says where in the script a rank is, for the report of a stall. If no answer comes, the ranks on the same host look at that
   process (:mod:`horovod.control.failure_detector`).
3. Rank 0 decides which rank failed first, and sends this :class:`Failure` to all. Every rank aborts with it. A rank that has
   lost all connections above it decides for itself and for the ranks below it.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.failure import ENGINE, LOST, Cause
from horovod.control.failure_detector import FailureDetector, Suspect
from horovod.control.liveness_links import LivenessLinks
from horovod.control.liveness_messages import (
    Bye,
    DumpRequest,
    Failure,
    FailureReport,
    Message,
    NoProgress,
    Ping,
    Pong,
    ProgressReport,
)
from horovod.control.liveness_tree import LivenessTree
from horovod.control.processes import KILLED
from horovod.control.wakeup import WakeUp

_log = logging.getLogger("horovod.control")


_SAME_REQUEST_SECONDS = 1.0
"""Within this time rank 0 forwards only one dump request of each kind, because all ranks may send the same one at once."""

_LAST_WORDS_SECONDS = 1.0
"""How long a leaving rank waits until its sockets have taken its last messages."""

OnFailure = Callable[[int, str, Cause], None]

RUNS = (
    "%s has not answered for %.0f seconds%s. Its process runs, so the job waits for it: something in the process holds "
    "Python's interpreter lock, or the machine is short of processor time or memory. To see what it does: py-spy dump "
    "--native --pid PROCESS"
)


class LivenessMonitor:
    """One rank's liveness connections and the thread that serves them.

    Args:
        rank: this rank.
        tree: of the liveness connections.
        channels: by rank, to the ranks with which the tree connects this one.
        answer_seconds: how long a peer may take to answer before a rank looks at its process.
        longest_seconds: how long a peer may take although its process runs; 0: no limit.
        where: returns the present line of this process in the user's script.
        look: returns why a rank cannot answer, or "" if its process runs; None if this process cannot see it.
        describe: returns a rank's number, host and process as text, for messages.
        on_failure: called once, on the liveness monitor's thread, with the rank that failed first, the reason, and further
            facts.
        threads: returns the present lines of this process's other threads.
        awaited: returns the names of the collectives that threads of the script wait for.
        on_dump: called on the same thread when this rank must write its flight recorder.
        on_progress: called on the same thread of rank 0 with a rank and what it reports.
        standing: returns what this rank waits for; empty if it may continue by itself.
        on_standing: called on the same thread of rank 0 with a rank, what it has answered, and when it was asked
            (``time.monotonic``). It returns when to ask all ranks again; None: not because of that.
    """

    def __init__(
        self,
        rank: int,
        tree: LivenessTree,
        channels: Mapping[int, Channel],
        answer_seconds: float,
        longest_seconds: float,
        where: Callable[[], str],
        look: Callable[[int], str | None],
        describe: Callable[[int], str],
        on_failure: OnFailure,
        threads: Callable[[], list[str]] = list,
        awaited: Callable[[], list[str]] = list,
        on_dump: Callable[[str, str], None] = lambda why, reason: None,
        on_progress: Callable[[int, bytes], None] = lambda rank, body: None,
        standing: Callable[[], bytes] = bytes,
        on_standing: Callable[[int, bytes, float], float | None] = lambda rank, body, asked: None,
    ) -> None:
        self._rank = rank
        self._answer_seconds = answer_seconds
        self._where = where
        self._look = look
        self._describe = describe
        self._on_failure = on_failure
        self._threads = threads
        self._awaited = awaited
        self._on_dump = on_dump
        self._on_progress = on_progress
        self._standing = standing
        self._on_standing = on_standing
        self._asked_at: dict[int, float] = {}
        self._look_again_at = float("inf")
        self._detector = FailureDetector(answer_seconds, longest_seconds)
        self._calls: deque[Callable[[], None]] = deque()
        self._own_failure_at = float("inf")
        self._own_failure = Failure(rank, "")
        self._decided = False
        self._leaving = False
        self.call_sites: dict[int, str] = {}
        """Each rank's line in the script, as of its last answer."""
        self.thread_lines: dict[int, list[str]] = {}
        """The lines of each rank's other threads, as of its last answer."""
        self.awaited: dict[int, list[str]] = {}
        """The collectives for which each rank's threads wait."""
        self.everyone_left = threading.Event()
        """Set once no rank below this one is connected any more."""
        self.no_progress: dict[int, tuple[str, float]] = {}
        """By rank: why this rank's engine sees no progress of that rank, and when it last reported so (``time.monotonic``)."""
        self._dumped: dict[str, float] = {}
        self._last_call_sites: dict[int, str] = {}
        self._poll = select.poll()
        self._links = LivenessLinks(rank, channels, tree, self._poll)
        self._wake_up = WakeUp()
        self._poll.register(self._wake_up, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="horovod-liveness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause = LOST) -> None:
        """Report that ``rank`` has failed; ``suspected``: perhaps through the fault of another rank. Any thread."""
        self._post(lambda: self._reported(FailureReport(rank, reason, suspected, cause)))

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        """Report for the n-th time in one wait that ``rank`` makes no progress in a collective. Any thread."""
        self.no_progress[rank] = (reason, time.monotonic())
        self._post(lambda: self._no_progress_reported(self._rank, NoProgress(rank, reason, times)))

    def probe(self) -> None:
        """Ping the peers, except those with an unanswered ping. Any thread; cheap."""
        self._post(self._ask_all)

    def request_dump(self, why: str, reason: str) -> None:
        """Have all ranks write their flight recorders. Any thread."""
        self._post(lambda: self._dump_requested(DumpRequest(why, reason), own=True))

    def report_progress(self, body: bytes) -> None:
        """On a member: send to rank 0 what this rank has done. Any thread."""
        self._post(lambda: self._links.send_by(self._links.above[:1], ProgressReport(body)))

    def disagreed(self, reason: str) -> None:
        """Have this rank write its flight recorder: a collective fails on all ranks, because they disagree. Any thread."""
        self._on_dump("mismatch", reason)

    def leave(self) -> None:
        """Send Bye, close the connections, end the thread. Any thread but the liveness monitor's own."""

        def send_bye() -> None:
            self._leaving = True
            self._links.send_by([*self._links.above, *self._links.links_below], Bye())
            self._links.flush_all(_LAST_WORDS_SECONDS)

        if self._thread.ident is not None:
            self._post(send_bye)
            self._thread.join()
        self._links.close()
        self._wake_up.close()

    def peers(self) -> list[int]:
        """The ranks that this one pings: those above it, or else those below it that have not left. Any thread."""
        return self._links.above or self._links.below

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return self._links.descriptors() + self._wake_up.descriptors()

    def _post(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the liveness monitor's thread, unless it has ended."""
        self._calls.append(call)
        self._wake_up.set()

    # Everything below runs on the liveness monitor's thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                for descriptor, event in self._poll.poll(self._milliseconds()):
                    link = self._links.of_descriptor(descriptor)
                    if descriptor == self._wake_up.fileno():
                        self._wake_up.clear()
                    elif link is not None:  # else another event of the same poll has dropped it
                        self._serve(link, event)
                self._carry_out_calls()
                self._inspect_unresponsive_peers()
                if time.monotonic() >= self._look_again_at:
                    self._look_again_at = float("inf")
                    self._ask_all()
                if self._detector.failure is not None:
                    self._found(self._detector.failure)
                elif time.monotonic() >= self._own_failure_at:
                    self._decide(self._own_failure)
        except Exception as error:  # after a bug here, no failure would be found any more
            _log.exception("the liveness monitor of rank %d failed", self._rank)
            self._decide(Failure(self._rank, f"its liveness monitor failed: {error!r}", ENGINE))

    def _carry_out_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _milliseconds(self) -> float | None:
        due = self._detector.due()
        for other in (self._own_failure_at, self._look_again_at):
            if other != float("inf"):
                due = other if due is None else min(due, other)
        return None if due is None else max(0.0, (due - time.monotonic()) * 1000 + 1)

    def _serve(self, link: int, event: int) -> None:
        if event == select.POLLOUT:
            self._links.flush(link)
            return
        try:
            for rank, message in self._links.receive(link):
                self._handle(rank, message)
        except ChannelClosed as closed:
            if closed.changed and not self._decided:  # the peer sees only that the link is closed, unless it is told
                lost = FailureReport if link in self._links.above else Failure
                self._links.send_by([link], lost(link, closed.network))
            self._drop(link)
            self._reported(FailureReport(link, closed.network or KILLED))
        except msgspec.DecodeError as error:
            self._drop(link)
            self._reported(FailureReport(link, f"it sent an invalid message: {error}"))

    def _handle(self, peer: int, message: Message) -> None:
        if isinstance(message, Ping):
            self._carry_out_calls()  # what this rank has to report comes before its answer
            if self._leaving:
                return
            seen = {rank: found for rank in message.about if (found := self._look(rank)) is not None}
            self._links.send([peer], Pong(self._where(), seen, self._threads(), self._awaited(), self._standing()))
            if peer not in self._links.above:
                self._ask_all()
        elif isinstance(message, Pong):
            self.call_sites[peer] = self._last_call_sites[peer] = message.where
            self.thread_lines[peer] = message.threads
            self.awaited[peer] = message.awaited
            self._detector.answered(peer, time.monotonic())
            self._stands(peer, message.standing, self._asked_at.get(peer, 0.0))
            for rank, found in message.seen.items():
                self._on_process_seen(rank, found)
        elif isinstance(message, FailureReport):
            self._reported(message)
        elif isinstance(message, NoProgress):
            self._no_progress_reported(peer, message)
        elif isinstance(message, Failure):
            self._decide(message)
        elif isinstance(message, DumpRequest):
            self._dump_requested(message)
        elif isinstance(message, ProgressReport):
            self._on_progress(peer, message.body)
        elif peer in self._links:
            self._drop(peer)
        else:
            self._links.left(peer)
            self._detector.left(peer)

    def _found(self, suspect: Suspect) -> None:
        """Act on the rank that the detector blames. The loss of a relay is reported to rank 0 through another relay."""
        if any(link != suspect.rank for link in self._links.above):
            self._detector.failure = None
            self._reported(FailureReport(suspect.rank, suspect.reason, cause=suspect.cause))
        else:
            self._decide(Failure(*suspect))

    def _reported(self, report: FailureReport) -> None:
        if self._decided:
            return
        if self._links.above:
            if self._own_failure_at == float("inf"):
                self._own_failure = Failure(report.rank, report.reason, report.cause)
                self._own_failure_at = time.monotonic() + self._answer_seconds * 2
            self._links.send_by(self._links.above, report)
            self._ask_all()  # perhaps a rank above is the one that failed
        elif report.suspected:
            self._detector.suspect(report.rank, report.reason, report.cause)
            self._ask_all()
        else:
            self._decide(Failure(report.rank, report.reason, report.cause))

    def _no_progress_reported(self, reporter: int, message: NoProgress) -> None:
        if self._links.above:
            self._links.send_by(self._links.above[:1], message)
        else:
            self._detector.report_no_progress(reporter, message.rank, message.reason, message.times)
        self._ask_all()

    def _dump_requested(self, request: DumpRequest, own: bool = False) -> None:
        if own and self._links.above:
            self._links.send_by(self._links.above[:1], request)
            return
        self._on_dump(request.why, request.reason)
        now = time.monotonic()
        if self._rank == 0 and now - self._dumped.get(request.why, -_SAME_REQUEST_SECONDS) >= _SAME_REQUEST_SECONDS:
            self._dumped[request.why] = now
            self._links.send(self._links.below, request)

    def _ask_all(self, about: Sequence[int] = ()) -> None:
        if self._decided:
            return
        self.call_sites[self._rank] = self._where()
        self.thread_lines[self._rank] = self._threads()
        self.awaited[self._rank] = self._awaited()
        now = time.monotonic()
        asked = self._detector.ask(self.peers(), now)
        self._asked_at.update(dict.fromkeys(asked, now))
        self._links.send(asked, Ping(list(about)))
        if self._rank == 0:
            self._stands(self._rank, self._standing(), now)

    def _stands(self, rank: int, standing: bytes, asked: float) -> None:
        """On rank 0: note what a rank waits for."""
        if self._rank == 0 and not self._decided:
            again = self._on_standing(rank, standing, asked)
            self._look_again_at = float("inf") if again is None else again

    def _inspect_unresponsive_peers(self) -> None:
        """Look at the processes of peers that have not answered in time. Other ranks look where this process cannot see.

        A rank whose relay does not answer either is pinged through its other relay.
        """
        hidden = []
        for peer in self._detector.overdue(time.monotonic()):
            ways = self._links.ways(peer)
            if len(ways) > 1 and self._detector.waits_for(ways[0]):
                self._links.send([peer], Ping(), other_way=True)
                continue
            found = self._look(peer)
            if found is None:
                hidden.append(peer)
            else:
                self._on_process_seen(peer, found)
        if hidden:
            self._ask_all(hidden)

    def _on_process_seen(self, rank: int, found: str) -> None:
        """Record what a rank has seen of the process of an unresponsive rank, and warn if a warning is due."""
        seconds = self._detector.process_seen(rank, found, time.monotonic())
        if seconds is None:
            return
        call_site = self._last_call_sites.get(rank, "")
        self.call_sites[rank] = f"{call_site or 'an unknown line'}, or was when it last answered"
        # All ranks may look at this one; a warning from rank 0 or 1 is enough.
        level = logging.WARNING if self._rank <= 1 else logging.INFO
        _log.log(level, RUNS, self._describe(rank), seconds, f"; it was at {call_site}" if call_site else "")

    def _decide(self, failure: Failure) -> None:
        if self._decided or self._leaving:
            return
        self._decided = True
        self._detector.close()
        self._own_failure_at = float("inf")
        self._links.send_by(self._links.links_below, failure)
        self._on_failure(failure.rank, failure.reason, failure.cause)

    def _drop(self, link: int) -> None:
        for rank in self._links.drop(link):
            self._detector.left(rank)
        if not self._links.links_below:
            self.everyone_left.set()
