"""The thread that sends and receives all messages of this process: it accepts connections, matches, reads and writes.

Other threads post a send or a receive with a handle. The mailbox's thread sleeps in one ``select`` while there is nothing to
do. While a send or receive is pending, it makes the liveness monitor check the other ranks, as a waiting worker does. It ends
with the runtime.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from horovod.comm.datatypes import Array
from horovod.comm.shm import cross_memory
from horovod.control.connection import Connection
from horovod.control.listener import ConnectionListener
from horovod.control.processes import own_process_namespace
from horovod.control.wakeup import WakeUp
from horovod.core.errors import EngineFailureError, HorovodInternalError, RankLostError
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.standing import Messages
from horovod.core.requests.handle import Handle
from horovod.torch.distributed.point_to_point.matching import ReceiveFilter
from horovod.torch.distributed.point_to_point.messages import Envelope
from horovod.torch.distributed.point_to_point.peers import Listening, PeerDirectory, PeerEndpoint, connect
from horovod.torch.distributed.point_to_point.receiving import Own, Receive, Receiver
from horovod.torch.distributed.point_to_point.sending import Send, Sender
from horovod.torch.distributed.point_to_point.wire import Wire

_log = logging.getLogger("horovod.torch")

_GRACE_SECONDS = 1.0
"""How long messages may still arrive after an orderly shutdown; also how long :meth:`Mailbox.fail` waits for the thread to stop
using tensors after a failure."""


class Mailbox:
    """The messages of one process, from the first send or receive to the end of the runtime.

    Args:
        generation: the runtime.
        store: the store of the default group.
    """

    def __init__(self, generation: Generation, store: Any) -> None:
        self._generation = generation
        self._rank = generation.identity.rank
        self._probe_seconds = generation.config.timeout.total_seconds() / 3
        self._next_probe = 0.0
        namespace = own_process_namespace()
        self._listening = Listening(generation, namespace)
        self._directory = PeerDirectory(store, generation)
        self._wake_up = WakeUp()
        self._calls: deque[Callable[[], None]] = deque()
        self._dialing: list[threading.Thread] = []
        self._error: HorovodInternalError | None = None
        self._last_moment = float("inf")
        self._turns = 0  # odd while the thread does something
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._wire = Wire(self._lost)
        self._receiver = Receiver(self._wire)
        self._sender = Sender(self._wire, namespace, self._dial)
        self._wire.selector.register(self._wake_up, selectors.EVENT_READ, lambda _: self._wake_up.clear())
        self._listener = ConnectionListener(
            self._wire.selector, self._listening.sockets, generation.secret, self._receiver.welcome
        )
        cross_memory.permit_siblings()
        self._directory.publish(self._rank, self._listening.endpoint)
        self._thread = threading.Thread(target=self._run, name="horovod-messages", daemon=True)
        self._thread.start()

    # For any thread.

    def send(self, rank: int, envelope: Envelope, data: Array, handle: Handle) -> None:
        """Send bytes to a global rank. The handle is done when the script may change them."""
        if rank == self._rank:
            own = Own(envelope, data, handle)
            self._post(lambda: self._receiver.take_own(own), handle)
        else:
            message = Send(envelope, data, handle)
            self._post(lambda: self._sender.begin(rank, message), handle)

    def receive(self, wanted: ReceiveFilter, receive: Receive) -> None:
        """Receive a message. The handle's result is the sender's rank in the group."""
        self._post(lambda: self._receiver.begin(wanted, receive), receive.handle)

    def _post(self, call: Callable[[], None], handle: Handle) -> None:
        if not self._call(call):
            assert self._error is not None
            handle.complete(self._error)

    def _call(self, call: Callable[[], None]) -> bool:
        """Queue ``call`` for the mailbox's thread; False if the thread has ended."""
        with self._lock:
            if self._left.is_set():
                return False
            self._calls.append(call)
        self._wake_up.set()
        return True

    def fail(self, error: HorovodInternalError, orderly: bool) -> None:
        """End because the runtime ends: see :class:`horovod.core.lifecycle.termination.Companion`."""
        self._error = self._error or error
        self._last_moment = time.monotonic() + (_GRACE_SECONDS if orderly else 0)
        self._wake_up.set()
        if not orderly and threading.current_thread() is not self._thread:
            self._left.wait(_GRACE_SECONDS)

    def messages(self) -> Messages | None:
        """See :class:`horovod.core.lifecycle.termination.Companion`. Between two turns of the thread nothing changes."""
        turns = self._turns
        if turns % 2 or self._calls or self._wire.orphans or self._left.is_set():
            return None
        try:
            receives, sends = self._receiver.pending(), self._sender.pending()
            sent, arrived = dict(self._wire.sent), dict(self._wire.arrived)
        except RuntimeError:  # a dictionary was changed meanwhile
            return None
        if receives is None or sends is None or self._turns != turns or self._calls:
            return None
        return Messages([*receives, *sends], sent, arrived)

    def close(self) -> None:
        """End the threads, and release everything."""
        self._last_moment = 0.0
        self._wake_up.set()
        for thread in [self._thread, *self._dialing]:
            thread.join(self._generation.config.timeout.total_seconds())
        if not self._thread.is_alive():
            self._wake_up.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        listening = [each.fileno() for each in self._listening.sockets]
        connections = [*self._receiver.descriptors(), *self._sender.descriptors()]
        return [*connections, *listening, *self._wake_up.descriptors()]

    # On the mailbox's thread.

    def _run(self) -> None:
        try:
            while time.monotonic() < self._last_moment:
                ready = self._wire.selector.select(self._seconds())
                self._turns += 1
                for key, events in ready:
                    key.data(events)
                self._listener.expire()
                while self._calls:
                    self._calls.popleft()()
                self._probe()
                self._turns += 1
        except Exception as error:
            _log.exception("rank %d: the thread for send() and recv() failed", self._rank)
            self._error = self._error or EngineFailureError(f"the thread for send() and recv() failed: {error!r}")
        self._end()

    def _seconds(self) -> float | None:
        """How long the thread may sleep; None: until it is woken."""
        limits = [self._listener.next_deadline(), self._last_moment, self._next_probe if self._busy() else None]
        due = min(limit for limit in limits if limit is not None)
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _busy(self) -> bool:
        return bool(self._wire.orphans) or self._receiver.waiting() or self._sender.busy()

    def _probe(self) -> None:
        now, busy = time.monotonic(), self._busy()
        if busy and now >= self._next_probe > 0:
            self._generation.watch.probe()
        if not busy:
            self._next_probe = 0.0
        elif now >= self._next_probe:
            self._next_probe = now + self._probe_seconds

    def _end(self) -> None:
        """Fail all pending sends and receives, and close all connections."""
        with self._lock:
            self._error = self._error or RankLostError("Horovod: the process group has ended.")
            self._left.set()
        while self._calls:  # their handles must fail, too
            self._calls.popleft()()
        handles = [*self._wire.orphans, *self._receiver.close(), *self._sender.close()]
        self._listener.close()
        self._wire.selector.close()
        self._listening.close()
        for handle in handles:
            handle.complete(self._error)

    def _dial(self, rank: int) -> None:
        def made(connection: Connection | None, endpoint: PeerEndpoint | None, why: str) -> None:
            taken = self._call(lambda: self._sender.connected(rank, connection, endpoint, why))
            if not taken and connection is not None:
                connection.close()

        self._dialing = [thread for thread in self._dialing if thread.is_alive()]
        self._dialing.append(connect(self._directory, self._generation, rank, self._is_over, made))

    def _is_over(self) -> bool:
        return self._left.is_set() or self._last_moment != float("inf")

    def _lost(self, rank: int, reason: str) -> None:
        """Have the liveness monitor find out which rank has failed, if any: a rank that shuts down also closes connections."""
        if self._error is None:
            self._generation.watch.report(rank, reason, suspected=True)


_making = threading.Lock()


def mailbox_of(generation: Generation, store: Any) -> Mailbox:
    """The mailbox of a runtime. The first call makes it.

    Args:
        generation: the runtime.
        store: the store of the default group.

    Raises:
        HorovodInternalError: the runtime has ended.
    """
    companions = generation.termination.companions
    with _making:
        for companion in companions:
            if isinstance(companion, Mailbox):
                return companion
        if generation.stopped is not None:
            raise generation.stopped.again()
        made = Mailbox(generation, store)
        companions.append(made)
    if generation.stopped is not None:  # it may have ended before the mailbox was a companion
        made.fail(generation.stopped, orderly=False)
    return made
