"""Framed bytes to and from all peers at once: the transport under ``comm.tcp``.

The lane thread queues what it wants sent and received, by reference, and then waits for some of it; while it waits,
everything queued in either direction moves, so ranks may all send first without a deadlock. One epoll loop, no threads,
no polling: a wait ends when its bytes have moved, a peer has failed, or :meth:`Exchange.abort` was called.

Every transfer starts with a header that its receiver knows in advance (which collective, which one of its kind, how many
bytes), so a peer that is out of step or speaks nonsense is found instead of believed. Knows nothing of reductions, data
types or arrays, and never writes into a buffer past what was asked for.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import IntEnum
from itertools import islice
from typing import TypeAlias

from horovod.comm.base import Aborted, PeerFailure


class Collective(IntEnum):
    """What a transfer is part of, as its header says."""

    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6


_HEADER = struct.Struct("<HHIQ")  # magic, Collective, number of the collective modulo 2**32, bytes that follow
_MAGIC = 0x4876
_BUFFERS_AT_ONCE = 64  # per system call; the kernel's own limit is 1024
_UNIX_BUFFER_BYTES = 1 << 20  # measured: 64 MB between 2 ranks takes a fifth less time than with the kernel's default
_LOOPBACK_BUFFER_BYTES = 384 << 10  # measured: the same takes a third less than with the kernel's own tuning

_LONGEST_POLL = 3600.0  # seconds; epoll counts milliseconds in 32 bits


class _Flow:
    """One direction of a link: buffers still to move, and how many bytes were queued and moved so far in all."""

    __slots__ = ("buffers", "done", "link", "queued")

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.buffers: deque[memoryview] = deque()
        self.queued = 0
        self.done = 0

    def append(self, buffer: memoryview) -> None:
        if buffer.nbytes:
            self.buffers.append(buffer)
            self.queued += buffer.nbytes

    def advance(self, count: int) -> None:
        """Note that the next ``count`` bytes have moved."""
        self.done += count
        buffers = self.buffers
        while count:
            size = buffers[0].nbytes
            if count < size:
                buffers[0] = buffers[0][count:]
                return
            buffers.popleft()
            count -= size


Mark: TypeAlias = tuple[_Flow, int]
"""A place in a flow: reached once that many bytes of it have moved."""


class _Link:
    """The connection to one peer."""

    __slots__ = (
        "blocked",
        "fd",
        "headers",
        "incoming",
        "interest",
        "outgoing",
        "rank",
        "registered",
        "socket",
        "stamp",
    )

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.fd = connection.fileno()
        self.outgoing = _Flow(self)
        self.incoming = _Flow(self)
        self.headers: deque[tuple[int, bytearray, bytes]] = deque()  # place in incoming, buffer, what it must hold
        self.interest = 0  # the epoll events now asked for
        self.registered = False
        self.blocked = False  # the kernel took less than was offered
        self.stamp = 0.0  # when bytes last moved, or a wait for this peer began

    def send(self) -> None:
        """Hand the kernel as much as it takes now."""
        buffers = self.outgoing.buffers
        self.blocked = False
        while buffers:
            try:
                if len(buffers) == 1:
                    offered = buffers[0].nbytes
                    count = self.socket.send(buffers[0])
                else:
                    some = list(islice(buffers, _BUFFERS_AT_ONCE))
                    offered = sum(buffer.nbytes for buffer in some)
                    count = self.socket.sendmsg(some)
            except BlockingIOError:
                self.blocked = True
                return
            except OSError as error:
                raise PeerFailure(self.rank, f"the connection to it was lost ({error.strerror})") from error
            self.outgoing.advance(count)
            if count < offered:
                self.blocked = True
                return

    def receive(self) -> None:
        """Take what has arrived, as far as it is wanted."""
        flow = self.incoming
        buffers = flow.buffers
        while buffers:
            try:
                if len(buffers) == 1:
                    wanted = buffers[0].nbytes
                    count = self.socket.recv_into(buffers[0])
                else:
                    some = list(islice(buffers, _BUFFERS_AT_ONCE))
                    wanted = sum(buffer.nbytes for buffer in some)
                    count = self.socket.recvmsg_into(some)[0]
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerFailure(self.rank, f"the connection to it was lost ({error.strerror})") from error
            if count == 0:
                raise PeerFailure(self.rank, "it closed its connection")
            flow.advance(count)
            headers = self.headers
            while headers and headers[0][0] <= flow.done:
                _, found, expected = headers.popleft()
                if found != expected:
                    raise PeerFailure(self.rank, _mismatch(bytes(found), expected))
            if count < wanted:
                return


class Exchange:
    """All connections of one rank of a group.

    Args:
        sockets: a connected stream socket to every other rank of the group. The exchange owns them from now on.
        timeout: how long a peer that is waited for may move no byte.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self._number = 0
        self._collective = Collective.BARRIER
        self._links = {rank: _Link(rank, connection) for rank, connection in sockets.items()}
        self._by_fd = {link.fd: link for link in self._links.values()}
        self._fresh: set[_Link] = set()  # links with something queued since the last wait
        for link in self._links.values():
            link.socket.setblocking(False)
            _tune(link.socket)
        self._lock = threading.Lock()  # between abort() and close()
        self._aborted = False
        self._closed = False
        self._owner = os.getpid()
        self._epoll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable for ever after abort()
        self._epoll.register(self._alarm, select.EPOLLIN)

    def begin(self, collective: Collective) -> None:
        """Start the next collective: every transfer queued from now on is part of it, on all ranks alike."""
        if self._aborted:
            raise Aborted("this communicator was aborted")
        self._collective = collective
        self._number = (self._number + 1) & 0xFFFFFFFF

    def send(self, rank: int, *buffers: memoryview) -> Mark:
        """Queue one transfer to ``rank``. The buffers must stay as they are until the returned mark is reached."""
        link = self._links[rank]
        flow = link.outgoing
        flow.append(memoryview(self._header(buffers)))
        for buffer in buffers:
            flow.append(buffer)
        self._fresh.add(link)
        return flow, flow.queued

    def receive(self, rank: int, *buffers: memoryview) -> Mark:
        """Ask for one transfer from ``rank``. The buffers hold it once the returned mark is reached."""
        link = self._links[rank]
        flow = link.incoming
        header = bytearray(_HEADER.size)
        flow.append(memoryview(header))
        link.headers.append((flow.queued, header, self._header(buffers)))
        for buffer in buffers:
            flow.append(buffer)
        self._fresh.add(link)
        return flow, flow.queued

    def _header(self, buffers: Iterable[memoryview]) -> bytes:
        return _HEADER.pack(_MAGIC, self._collective, self._number, sum(buffer.nbytes for buffer in buffers))

    def wait(self, marks: Iterable[Mark]) -> None:
        """Move bytes until every one of ``marks`` is reached.

        Raises:
            PeerFailure: a peer is gone or out of step, or one that is waited for moved nothing for the timeout.
            Aborted: :meth:`abort` was called.
        """
        if self._aborted:
            raise Aborted("this communicator was aborted")
        for link in self._fresh:
            if link.outgoing.buffers and not link.blocked:
                link.send()
            self._watch(link)
        self._fresh.clear()
        missing = [mark for mark in marks if mark[0].done < mark[1]]
        if not missing:
            return
        now = time.monotonic()
        for flow, _ in missing:
            flow.link.stamp = now
        while missing:
            silent = min((flow.link for flow, _ in missing), key=lambda link: link.stamp)
            remaining = silent.stamp + self._timeout - now
            if remaining <= 0:
                raise PeerFailure(silent.rank, f"it made no progress for {self._timeout:g} seconds", suspected=True)
            events = self._epoll.poll(min(remaining, _LONGEST_POLL))
            now = time.monotonic()
            for fd, event in events:
                if fd == self._alarm:
                    raise Aborted("this communicator was aborted")
                link = self._by_fd[fd]
                link.stamp = now
                if event & ~select.EPOLLOUT:
                    if link.incoming.buffers:
                        link.receive()
                    else:
                        self._ignore(link, event)
                if link.outgoing.buffers:
                    link.send()
                self._watch(link)
            missing = [mark for mark in missing if mark[0].done < mark[1]]

    def _watch(self, link: _Link) -> None:
        """Ask epoll for what the link waits for. Arrivals stay asked for until one is unwanted: that saves system calls."""
        interest = link.interest & select.EPOLLIN
        if link.incoming.buffers:
            interest = select.EPOLLIN
        if link.blocked:
            interest |= select.EPOLLOUT | select.EPOLLRDHUP
        if not link.registered:
            if interest:
                self._epoll.register(link.fd, interest)
                link.registered = True
        elif interest != link.interest:
            self._epoll.modify(link.fd, interest)
        link.interest = interest

    def _ignore(self, link: _Link, event: int) -> None:
        """Something arrived of which nothing is wanted yet: a peer ahead of us, or one that is done and has left."""
        if event & select.EPOLLRDHUP and link.outgoing.buffers:
            raise PeerFailure(link.rank, "it closed its connection")
        if event & (select.EPOLLHUP | select.EPOLLERR) and not link.outgoing.buffers:
            self._epoll.unregister(link.fd)  # the only way to ask epoll not to report this
            link.registered = False
            link.interest = 0
        elif event & select.EPOLLIN:
            link.interest &= ~select.EPOLLIN
            self._epoll.modify(link.fd, link.interest)

    def abort(self) -> None:
        """End the present wait and every later one with :class:`Aborted`. From any thread, any number of times."""
        with self._lock:
            self._aborted = True
            if not self._closed:
                os.eventfd_write(self._alarm, 1)

    def close(self) -> None:
        """Close every connection. Peers see it at once, even where a forked child still holds a copy of the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._alarm)
        self._epoll.close()
        for link in self._links.values():
            link.incoming.buffers.clear()
            link.outgoing.buffers.clear()
            if os.getpid() == self._owner:
                try:
                    link.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the peer was faster
            link.socket.close()


def _tune(connection: socket.socket) -> None:
    """Keep what is under way inside one machine small enough for its caches; between hosts the kernel knows better."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)


def _mismatch(found: bytes, expected: bytes) -> str:
    magic, collective, number, length = _HEADER.unpack(found)
    if magic != _MAGIC or collective not in tuple(Collective):
        return "it sent bytes that are not part of any collective"

    def describe(collective: int, number: int, length: int) -> str:
        return f"{Collective(collective).name.lower()} number {number} ({length} bytes)"

    return (
        f"it is out of step: it sent part of {describe(collective, number, length)}"
        f" where {describe(*_HEADER.unpack(expected)[1:])} was due"
    )
