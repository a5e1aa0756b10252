"""Sends and receives all messages of this process: accepts connections, matches, reads and writes.

Waking another thread takes longer than a small message. So a thread that sends or receives does what it can itself, and a
thread that waits for a message serves the connections for a while; one thread at a time does. The mailbox's own thread does the
rest: it sleeps in one ``select`` while there is nothing to do, and leaves the connections to other threads while these serve
them. While a send or receive is pending, it makes the liveness monitor check the other ranks, as a waiting worker does. It ends
with the runtime.
"""

from __future__ import annotations

import logging
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from horovod._base.signal_deferral import with_signals_deferred
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
from horovod.core.worker.waiting import STANDBY_MILLISECONDS, Patience
from horovod.torch.distributed.point_to_point.matching import ReceiveFilter
from horovod.torch.distributed.point_to_point.messages import Envelope
from horovod.torch.distributed.point_to_point.peers import Listening, PeerDirectory, PeerEndpoint, connect
from horovod.torch.distributed.point_to_point.receiving import Own, Receive, Receiver
from horovod.torch.distributed.point_to_point.sending import Send, Sender
from horovod.torch.distributed.point_to_point.wire import Wire

_log = logging.getLogger("horovod.torch")

_DRIVE_SECONDS = 0.01
"""How long a thread that waits for a message serves the connections. Signal handlers are deferred meanwhile."""
_POLLS = 25
"""How often it polls before it sleeps, at most; about a hundred microseconds."""
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
        self._next_probe = time.monotonic() + self._probe_seconds
        namespace = own_process_namespace()
        self._listening = Listening(generation, namespace)
        self._directory = PeerDirectory(store, generation)
        self._wake_up = WakeUp()
        self._woken = select.poll()
        self._woken.register(self._wake_up, select.POLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self._dialing: list[threading.Thread] = []
        self._error: HorovodInternalError | None = None
        self._last_moment = float("inf")
        self._lock = threading.Lock()
        self._access = threading.Lock()  # of the thread that serves the connections
        self._patience = Patience(_POLLS)
        self._driven = self._seen = 0
        self._took_wake_up = False  # by the thread that serves the connections
        self._left = threading.Event()
        self._wire = Wire(self._lost)
        self._receiver = Receiver(self._wire)
        self._sender = Sender(self._wire, namespace, self._dial)
        self._wire.selector.register(self._wake_up, selectors.EVENT_READ, lambda _: self._wake_up.clear())
        self._listener = ConnectionListener(
            self._wire.selector,
            self._listening.sockets,
            generation.secret,
            self._receiver.welcome,
            expected=generation.identity.size,
        )
        cross_memory.permit_siblings()
        self._directory.publish(self._rank, self._listening.endpoint)
        self._thread = threading.Thread(target=self._run, name="horovod-messages", daemon=True)
        self._thread.start()

    # For any thread.

    def send(self, rank: int, envelope: Envelope, data: Array, handle: Handle) -> None:
        """Send bytes to a global rank. The handle is done when the script may change them."""
        handle.driver = self
        if rank == self._rank:
            own = Own(envelope, data, handle)
            self._post(lambda: self._receiver.take_own(own), handle)
        else:
            message = Send(envelope, data, handle)
            self._post(lambda: self._sender.begin(rank, message), handle)

    def receive(self, wanted: ReceiveFilter, receive: Receive) -> None:
        """Receive a message. The handle's result is the sender's rank in the group.

        While no message waits for a receive, this one is only queued: what can arrive for it is handled by a thread that makes
        the queued calls afterwards.
        """
        receive.handle.driver = self
        self._post(lambda: self._receiver.begin(wanted, receive), receive.handle, lambda: self._receiver.held() > 0)

    def _post(self, call: Callable[[], None], handle: Handle, urgent: Callable[[], bool] = lambda: True) -> None:
        """Queue a call. If it is urgent once it is queued, make it here, unless another thread serves the connections."""
        if not self._queue(call):
            handle.complete(self._error)
        elif urgent() and not with_signals_deferred(self._call_queued):
            self._wake_up.set()

    def _queue(self, call: Callable[[], None]) -> bool:
        """Queue ``call`` for the thread that serves the connections; False if the mailbox has ended."""
        with self._lock:
            if self._left.is_set():
                return False
            self._calls.append(call)
        return True

    def _call_queued(self) -> bool:
        """Make the queued calls, unless another thread serves the connections; whether they were made."""
        if not self._access.acquire(blocking=False):
            return False
        try:
            return self._guarded(self._make_calls)
        finally:
            self._access.release()

    def drive(self, handle: Handle) -> None:
        """Serve the connections on the calling thread, which waits for ``handle``, until it is done or some time has passed."""
        with_signals_deferred(self._drive, handle)

    def take_over(self, handle: Handle) -> None:
        """Have the mailbox's thread serve the connections again, because no thread will that waits for ``handle``."""
        self._wake_up.set()

    def _drive(self, handle: Handle) -> None:
        if not self._access.acquire(timeout=_DRIVE_SECONDS):
            return
        try:
            self._guarded(self._serve_until, handle)
        finally:
            took, self._took_wake_up = self._took_wake_up, False
            self._access.release()
            if took:
                self._wake_up.set()

    def _serve_until(self, handle: Handle) -> None:
        """Serve the connections until ``handle`` is done, the mailbox ends, or some time has passed.

        What the mailbox's thread is woken for meanwhile is done here. It looks again afterwards.
        """
        self._driven += 1
        self._make_calls()
        for poll in range(self._patience.polls):
            if handle.done():
                if poll > 1:
                    self._patience.answered()
                return
            if not self._serve(0):
                return
        began = now = time.monotonic()
        while not handle.done() and (left := began + _DRIVE_SECONDS - now) > 0 and self._serve(left):
            now = time.monotonic()
        self._patience.slept(time.monotonic() - began)

    def _serve(self, seconds: float | None) -> bool:
        """Wait for events on the connections, and handle them; False if the mailbox is about to end."""
        for key, events in self._wire.selector.select(seconds):
            key.data(events)
            if key.fileobj is self._wake_up:
                self._took_wake_up = True
                if self._is_over():
                    return False
        self._make_calls()
        return True

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _guarded(self, serve: Callable[..., None], *arguments: Any) -> bool:
        """Call ``serve`` unless the mailbox has ended, and end the mailbox if it fails; False then."""
        if self._left.is_set():
            return False
        try:
            serve(*arguments)
        except Exception as error:
            _log.exception("rank %d: a thread that served send() and recv() failed", self._rank)
            self._error = self._error or EngineFailureError(f"a thread that served send() and recv() failed: {error!r}")
            self._last_moment = 0.0
            return False
        return True

    def fail(self, error: HorovodInternalError, orderly: bool) -> None:
        """End because the runtime ends: see :class:`horovod.core.lifecycle.termination.Companion`."""
        self._error = self._error or error
        self._last_moment = time.monotonic() + (_GRACE_SECONDS if orderly else 0)
        self._wake_up.set()
        if not orderly and threading.current_thread() is not self._thread:
            self._left.wait(_GRACE_SECONDS)

    def messages(self) -> Messages | None:
        """See :class:`horovod.core.lifecycle.termination.Companion`. None while a thread serves the connections."""
        if not self._access.acquire(blocking=False):
            return None
        try:
            if self._calls:
                self._wake_up.set()
            if self._calls or self._wire.orphans or self._left.is_set():
                return None
            receives, sends = self._receiver.pending(), self._sender.pending()
            if receives is None or sends is None:
                return None
            sent, arrived = dict(self._wire.sent), dict(self._wire.arrived)
            return Messages([*receives, *sends], sent, arrived, self._sender.unconnected())
        finally:
            self._access.release()

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
        while time.monotonic() < self._last_moment:
            if self._driven != self._seen or self._access.locked():  # standby
                driven, woken = self._driven, self._woken.poll(STANDBY_MILLISECONDS)
                self._seen = self._driven if woken else driven
                if not woken and self._seconds():
                    continue  # nothing is due, and another thread may need the connections at any moment
                ready = self._wire.selector.select(0) if woken else []
            else:
                ready = self._wire.selector.select(self._seconds())
            with self._access:
                self._guarded(self._step, ready)
        with self._access:
            self._end()

    def _step(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Do everything there is to do now."""
        known = self._wire.selector.get_map()
        for key, events in ready:
            if known.get(key.fd) is key:  # another thread may have closed the connection
                key.data(events)
        self._listener.expire()
        self._make_calls()
        self._probe()

    def _seconds(self) -> float | None:
        """How long the thread may sleep. Another thread may begin a send or receive meanwhile, which is probed for, too."""
        limits = [self._listener.next_deadline(), self._last_moment, self._next_probe]
        due = min(limit for limit in limits if limit is not None)
        return max(0.0, due - time.monotonic())

    def _busy(self) -> bool:
        return bool(self._wire.orphans) or self._receiver.waiting() or self._sender.busy()

    def _probe(self) -> None:
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + self._probe_seconds
            if self._busy():
                self._generation.watch.probe()

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
            taken = self._queue(lambda: self._sender.connected(rank, connection, endpoint, why))
            self._wake_up.set()
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
