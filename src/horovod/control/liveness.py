"""The sentinel: one thread a rank that knows who is alive and makes all ranks give one answer to "who failed first?".

Every rank holds a connection to rank 0 on which nothing is sent while all is well, so an idle job costs nothing. It
breaks when a process dies. A rank whose lane sees a failure reports it; rank 0 decides, tells everybody the same
*verdict*, and every rank's runtime aborts with it. A rank that waits long asks whether its peers still answer: that is how
a stopped process or a machine that vanished without a word is found. The answer says where in the user's script that
rank is, for the report on a stall.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from horovod.control.channel import Channel, ChannelClosed

_log = logging.getLogger("horovod.control")


class Ping(msgspec.Struct, tag=True):
    """Do you answer?"""


class Pong(msgspec.Struct, tag=True):
    """I do; my main thread is at ``where``."""

    where: str


class Report(msgspec.Struct, tag=True):
    """A lane saw ``rank`` fail; ``suspected`` when it was only silent."""

    rank: int
    reason: str
    suspected: bool


class Verdict(msgspec.Struct, tag=True):
    """Rank 0's word on who failed first and how."""

    rank: int
    reason: str


class Bye(msgspec.Struct, tag=True):
    """This rank has shut down in good order; its connection will close."""


_decoder = msgspec.msgpack.Decoder(Ping | Pong | Report | Verdict | Bye)
_encode = msgspec.msgpack.Encoder().encode

OnVerdict = Callable[[int, str], None]

KILLED = "its process ended without hvd.shutdown(): it crashed, was killed, or its host went away"
SILENT = "it does not answer any more: its process is stopped, starved or swapped out, or its host is unreachable"


class Sentinel:
    """One rank's liveness connections and the thread that serves them.

    Args:
        rank: this rank.
        links: on rank 0 a channel to every other rank, elsewhere one to rank 0.
        answer_seconds: how long a peer may take to answer.
        where: tells where in the user's script this process is.
        on_verdict: called once, on the sentinel's thread, with the rank that failed first and the reason.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Channel],
        answer_seconds: float,
        where: Callable[[], str],
        on_verdict: OnVerdict,
    ) -> None:
        self._rank = rank
        self._links = dict(links)
        self._answer_seconds = answer_seconds
        self._where = where
        self._on_verdict = on_verdict
        self._errands: deque[Callable[[], None]] = deque()
        self._asked: dict[int, float] = {}
        self._suspicion: Report | None = None
        self._own_verdict_at = float("inf")
        self._own_verdict = Verdict(rank, "")
        self._decided = False
        self._leaving = False
        self.whereabouts: dict[int, str] = {}
        """Where each rank said it was when it last answered."""
        self._poll = select.poll()
        self._by_descriptor = {}
        for peer, link in self._links.items():
            self._poll.register(link, select.POLLIN)
            self._by_descriptor[link.fileno()] = peer
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="horovod-sentinel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, rank: int, reason: str, suspected: bool = False) -> None:
        """Tell that ``rank`` failed. Any thread. ``suspected``: it was silent, which may have another cause."""
        self._post(lambda: self._reported(Report(rank, reason, suspected)))

    def probe(self) -> None:
        """Ask whether the peers still answer. Any thread; cheap; asks nobody twice at a time."""
        self._post(self._ask_all)

    def leave(self) -> None:
        """Say good-bye, close the connections, end the thread. Any thread but the sentinel's own."""

        def farewell() -> None:
            self._leaving = True
            for peer in list(self._links):
                self._send(peer, Bye())

        if self._thread.ident is not None:
            self._post(farewell)
            self._thread.join()
        for link in self._links.values():
            link.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return [link.fileno() for link in self._links.values()] + [self._wake_read, self._wake_write]

    def _post(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # enough wake-ups are under way
        except OSError:
            pass  # the sentinel has left; nobody is there to be told

    # Everything below runs on the sentinel's thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                for descriptor, _ in self._poll.poll(self._milliseconds()):
                    if descriptor == self._wake_read:
                        os.read(self._wake_read, 4096)
                    elif descriptor in self._by_descriptor:  # else it was dropped by another event of the same moment
                        self._serve(self._by_descriptor[descriptor])
                while self._errands:
                    self._errands.popleft()()
                self._check_deadlines()
        except Exception as error:  # a bug here must not leave the job without a watch
            _log.exception("the sentinel of rank %d failed", self._rank)
            self._decide(Verdict(self._rank, f"its sentinel thread failed: {error!r}"))

    def _milliseconds(self) -> float | None:
        deadlines = [asked + self._answer_seconds for asked in self._asked.values()]
        if self._own_verdict_at != float("inf"):
            deadlines.append(self._own_verdict_at)
        return max(0.0, (min(deadlines) - time.monotonic()) * 1000 + 1) if deadlines else None

    def _serve(self, peer: int) -> None:
        try:
            messages = self._links[peer].receive()
        except ChannelClosed:
            self._drop(peer)
            self._decide(Verdict(peer, KILLED))
            return
        for body in messages:
            try:
                self._handle(peer, _decoder.decode(body))
            except msgspec.DecodeError as error:
                self._drop(peer)
                self._decide(Verdict(peer, f"it sent a message that is none: {error}"))
                return

    def _handle(self, peer: int, message: Ping | Pong | Report | Verdict | Bye) -> None:
        if isinstance(message, Ping):
            self._send(peer, Pong(self._where()))
            if self._rank == 0:
                self._ask_all()
        elif isinstance(message, Pong):
            self._asked.pop(peer, None)
            self.whereabouts[peer] = message.where
            self._settle_suspicion()
        elif isinstance(message, Report):
            self._reported(message)
        elif isinstance(message, Verdict):
            self._decide(message)
        else:
            self._drop(peer)
            self._settle_suspicion()

    def _settle_suspicion(self) -> None:
        """Once everybody who was asked has answered or left, the rank that only seemed silent is to blame after all."""
        if self._suspicion is not None and not self._asked:
            self._decide(Verdict(self._suspicion.rank, self._suspicion.reason))

    def _reported(self, report: Report) -> None:
        if self._decided:
            return
        if self._rank != 0 and 0 in self._links:
            if self._own_verdict_at == float("inf"):
                self._own_verdict = Verdict(report.rank, report.reason)
                self._own_verdict_at = time.monotonic() + self._answer_seconds * 2
            self._send(0, report)
            self._ask_all()  # if rank 0 does not answer, it is the one that failed
        elif report.suspected and self._suspicion is None and self._links:
            self._suspicion = report
            self._ask_all()
        elif not report.suspected or not self._links:
            self._decide(Verdict(report.rank, report.reason))

    def _ask_all(self) -> None:
        if self._decided:
            return
        self.whereabouts[self._rank] = self._where()
        now = time.monotonic()
        for peer in list(self._links):
            if peer not in self._asked:
                self._asked[peer] = now
                self._send(peer, Ping())

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for peer, asked in list(self._asked.items()):
            if now - asked >= self._answer_seconds:
                self._decide(Verdict(peer, SILENT))
                return
        if now >= self._own_verdict_at:
            self._decide(self._own_verdict)

    def _decide(self, verdict: Verdict) -> None:
        if self._decided or self._leaving:
            return
        self._decided = True
        self._suspicion = None
        self._asked.clear()
        self._own_verdict_at = float("inf")
        if self._rank == 0:
            for peer in list(self._links):
                self._send(peer, verdict)
        self._on_verdict(verdict.rank, verdict.reason)

    def _send(self, peer: int, message: Ping | Pong | Report | Verdict | Bye) -> None:
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
            self._asked.pop(peer, None)
            self._poll.unregister(link)
            del self._by_descriptor[link.fileno()]
            link.close()
