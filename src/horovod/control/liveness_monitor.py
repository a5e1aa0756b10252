"""The liveness monitor: one thread a rank that knows who is alive and makes all ranks give one answer to "who failed first?".

Every rank holds a connection to rank 0 on which nothing is sent while all is well, so an idle job costs nothing. It
breaks when a process dies. A rank whose worker thread sees a failure reports it; rank 0 decides, tells everybody the same
*verdict*, and every rank's runtime aborts with it. A rank that waits long asks whether its peers still answer: that is how
a stopped process or a machine that vanished without a word is found. The answer says where in the user's script that
rank is, for the report on a stall. What follows from answers, and from their absence, is
:mod:`horovod.control.failure_detector`.
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
from horovod.control.failure_detector import FailureDetector
from horovod.control.processes import KILLED
from horovod.control.wakeup import WakeUp

_log = logging.getLogger("horovod.control")


class Ping(msgspec.Struct, tag=True):
    """Do you answer? And what do you see of the ranks ``about``, which do not?"""

    about: list[int] = []


class Pong(msgspec.Struct, tag=True):
    """I do; my main thread is at ``where``. ``seen``: why a rank that was asked about cannot answer, "" if it runs."""

    where: str
    seen: dict[int, str] = {}


class Report(msgspec.Struct, tag=True):
    """A worker thread saw ``rank`` fail; ``suspected`` when that may have been another's fault."""

    rank: int
    reason: str
    suspected: bool


class NoProgress(msgspec.Struct, tag=True):
    """A worker thread sees no progress of ``rank``, for the n-th time in this wait, and goes on waiting."""

    rank: int
    reason: str
    times: int


class Failure(msgspec.Struct, tag=True):
    """Rank 0's word on who failed first and how."""

    rank: int
    reason: str


class Bye(msgspec.Struct, tag=True):
    """This rank has shut down in good order; its connection will close."""


Message = Ping | Pong | Report | NoProgress | Failure | Bye

_decoder = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode

OnFailure = Callable[[int, str], None]

RUNS = (
    "%s has not answered for %.0f seconds%s. Its process runs, so it is waited for: something in it holds Python's interpreter "
    "lock, or the machine is short of processor time or memory. To see what it does: py-spy dump --native --pid PROCESS"
)


class LivenessMonitor:
    """One rank's liveness connections and the thread that serves them.

    Args:
        rank: this rank.
        links: on rank 0 a channel to every other rank, elsewhere one to rank 0.
        answer_seconds: how long a peer may take to answer before somebody looks after its process.
        longest_seconds: how long it may take although its process runs; 0: without end.
        where: tells where in the user's script this process is.
        look: tells why a rank cannot answer, or "" if its process runs; None if this process cannot see it.
        who: a rank's number, host and process, for people.
        on_verdict: called once, on the liveness monitor's thread, with the rank that failed first and the reason.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Channel],
        answer_seconds: float,
        longest_seconds: float,
        where: Callable[[], str],
        look: Callable[[int], str | None],
        who: Callable[[int], str],
        on_failure: OnFailure,
    ) -> None:
        self._rank = rank
        self._links = dict(links)
        self._answer_seconds = answer_seconds
        self._where = where
        self._look = look
        self._who = who
        self._on_failure = on_failure
        self._detector = FailureDetector(answer_seconds, longest_seconds)
        self._calls: deque[Callable[[], None]] = deque()
        self._own_failure_at = float("inf")
        self._own_failure = Failure(rank, "")
        self._decided = False
        self._leaving = False
        self.call_sites: dict[int, str] = {}
        """Where each rank is, as far as it has told."""
        self._last_places: dict[int, str] = {}
        self._poll = select.poll()
        self._by_descriptor = {}
        for peer, link in self._links.items():
            self._poll.register(link, select.POLLIN)
            self._by_descriptor[link.fileno()] = peer
        self._wake_up = WakeUp()
        self._poll.register(self._wake_up, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="horovod-liveness monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, rank: int, reason: str, suspected: bool = False) -> None:
        """Tell that ``rank`` failed. Any thread. ``suspected``: that may have been another's fault."""
        self._post(lambda: self._reported(Report(rank, reason, suspected)))

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        """Tell that ``rank`` makes no progress in a collective, for the n-th time in this wait, which goes on. Any thread."""
        self._post(lambda: self._no_progress_reported(self._rank, NoProgress(rank, reason, times)))

    def probe(self) -> None:
        """Ask whether the peers still answer. Any thread; cheap; asks nobody twice at a time."""
        self._post(self._ask_all)

    def leave(self) -> None:
        """Say good-bye, close the connections, end the thread. Any thread but the liveness monitor's own."""

        def farewell() -> None:
            self._leaving = True
            for peer in list(self._links):
                self._send(peer, Bye())

        if self._thread.ident is not None:
            self._post(farewell)
            self._thread.join()
        for link in self._links.values():
            link.close()
        self._wake_up.close()

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return [link.fileno() for link in self._links.values()] + self._wake_up.descriptors()

    def _post(self, remote_call: Callable[[], None]) -> None:
        self._calls.append(remote_call)
        self._wake_up.set()  # if the liveness monitor has left, nobody is there to be told

    # Everything below runs on the liveness monitor's thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                for descriptor, _ in self._poll.poll(self._milliseconds()):
                    if descriptor == self._wake_up.fileno():
                        self._wake_up.clear()
                    elif descriptor in self._by_descriptor:  # else it was dropped by another event of the same moment
                        self._serve(self._by_descriptor[descriptor])
                while self._calls:
                    self._calls.popleft()()
                self._look_after_the_silent()
                if self._detector.failure is not None:
                    self._decide(Failure(*self._detector.failure))
                elif time.monotonic() >= self._own_failure_at:
                    self._decide(self._own_failure)
        except Exception as error:  # a bug here must not leave the job without a watch
            _log.exception("the liveness monitor of rank %d failed", self._rank)
            self._decide(Failure(self._rank, f"its liveness monitor failed: {error!r}"))

    def _milliseconds(self) -> float | None:
        due = self._detector.due()
        if self._own_failure_at != float("inf"):
            due = self._own_failure_at if due is None else min(due, self._own_failure_at)
        return None if due is None else max(0.0, (due - time.monotonic()) * 1000 + 1)

    def _serve(self, peer: int) -> None:
        try:
            messages = self._links[peer].receive()
        except ChannelClosed:
            self._drop(peer)
            self._decide(Failure(peer, KILLED))
            return
        for body in messages:
            try:
                self._handle(peer, _decoder.decode(body))
            except msgspec.DecodeError as error:
                self._drop(peer)
                self._decide(Failure(peer, f"it sent a message that is none: {error}"))
                return

    def _handle(self, peer: int, message: Message) -> None:
        if isinstance(message, Ping):
            seen = {rank: found for rank in message.about if (found := self._look(rank)) is not None}
            self._send(peer, Pong(self._where(), seen))
            if self._rank == 0:
                self._ask_all()
        elif isinstance(message, Pong):
            self.call_sites[peer] = self._last_places[peer] = message.where
            self._detector.answered(peer, time.monotonic())
            for rank, found in message.seen.items():
                self._testify(rank, found)
        elif isinstance(message, Report):
            self._reported(message)
        elif isinstance(message, NoProgress):
            self._no_progress_reported(peer, message)
        elif isinstance(message, Failure):
            self._decide(message)
        else:
            self._drop(peer)

    def _reported(self, report: Report) -> None:
        if self._decided:
            return
        if self._rank != 0 and 0 in self._links:
            if self._own_failure_at == float("inf"):
                self._own_failure = Failure(report.rank, report.reason)
                self._own_failure_at = time.monotonic() + self._answer_seconds * 2
            self._send(0, report)
            self._ask_all()  # if rank 0 does not answer, it is perhaps the one that failed
        elif report.suspected:
            self._detector.suspect(report.rank, report.reason)
            self._ask_all()
        else:
            self._decide(Failure(report.rank, report.reason))

    def _no_progress_reported(self, reporter: int, message: NoProgress) -> None:
        if self._rank != 0 and 0 in self._links:
            self._send(0, message)
        else:
            self._detector.report_no_progress(reporter, message.rank, message.reason, message.times)
        self._ask_all()

    def _ask_all(self, about: Sequence[int] = ()) -> None:
        if self._decided:
            return
        self.call_sites[self._rank] = self._where()
        for peer in self._detector.ask(list(self._links), time.monotonic()):
            self._send(peer, Ping(list(about)))

    def _look_after_the_silent(self) -> None:
        """Where peers owe an answer for too long, look whether their processes run; others look where this one cannot."""
        hidden = []
        for peer in self._detector.overdue(time.monotonic()):
            found = self._look(peer)
            if found is None:
                hidden.append(peer)
            else:
                self._testify(peer, found)
        if hidden:
            self._ask_all(hidden)

    def _testify(self, rank: int, found: str) -> None:
        """Somebody has looked at the process of a rank that does not answer."""
        seconds = self._detector.testify(rank, found, time.monotonic())
        if seconds is None:
            return
        place = self._last_places.get(rank, "")
        self.call_sites[rank] = f"{place or 'a place unknown'}, or was when it last answered"
        level = logging.WARNING if self._rank <= 1 else logging.INFO  # of rank 0 all others could tell
        _log.log(level, RUNS, self._who(rank), seconds, f"; it was at {place}" if place else "")

    def _decide(self, failure: Failure) -> None:
        if self._decided or self._leaving:
            return
        self._decided = True
        self._detector.close()
        self._own_failure_at = float("inf")
        if self._rank == 0:
            for peer in list(self._links):
                self._send(peer, failure)
        self._on_failure(failure.rank, failure.reason)

    def _send(self, peer: int, message: Message) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        try:
            link.send(_encode(message))  # a few bytes: what the kernel does not take now goes with the next message
            link.flush()
        except ChannelClosed:
            link.discard()  # what it said before it closed, perhaps Bye, is still to be read; then comes its end

    def _drop(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._poll.unregister(link)
            del self._by_descriptor[link.fileno()]
            link.close()
            self._detector.left(peer)
