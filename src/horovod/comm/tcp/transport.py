"""Framed bytes to and from all peers at once over stream sockets: the transport of the engine ``tcp``.

The worker thread queues transfers in both directions, by reference, and then waits for some of them. While it waits, all queued
transfers move, so all ranks may send first without a deadlock. There is one epoll loop, no other thread and no polling: a wait
ends when its bytes have moved, a peer has failed, or :meth:`PeerExchange.abort` was called.

There may be several connections to a peer, over several networks. Both sides use them in the same cyclic order, one transfer
each.

This module knows no reductions, data types or arrays. It must never wait for anything but its epoll object, which ``abort`` can
always wake.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import cycle

from horovod.comm.base import Aborted, OnStall, Stall, give_up
from horovod.comm.exchange.base import Mark, PeerExchange
from horovod.comm.tcp.link import TcpFlow, TcpLink, tune

_LONGEST_POLL = 3600.0  # seconds; epoll counts milliseconds in 32 bits
_STALLS = 2  # after this many stall timeouts the wait ends if the network has lost the peer's host
_NO_MORE: Mapping[int, Sequence[socket.socket]] = {}


class TcpExchange(PeerExchange[TcpFlow]):
    """All connections of one rank of a group.

    Args:
        sockets: a connected stream socket to every other rank, by index. The exchange owns them from now on, and those of
            ``more``.
        stall_timeout: how long a peer may move no byte while this rank waits for it.
        on_stall: called when a peer has moved no byte for ``stall_timeout``.
        more: further connections to the same ranks, by index; both ends must have them in the same order.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        stall_timeout: timedelta,
        on_stall: OnStall = give_up,
        more: Mapping[int, Sequence[socket.socket]] = _NO_MORE,
    ) -> None:
        super().__init__()
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        links = {
            rank: [TcpLink(rank, each) for each in (connection, *more.get(rank, ()))]
            for rank, connection in sockets.items()
        }
        self._by_fd = {link.fd: link for some in links.values() for link in some}
        self._to = {rank: cycle(some) for rank, some in links.items()}  # which link carries the next transfer
        self._from = {rank: cycle(some) for rank, some in links.items()}
        self._between_hosts = any(link.ends for link in self._by_fd.values())
        self._fresh: set[TcpLink] = set()  # links with something queued since the last wait
        for link in self._by_fd.values():
            link.socket.setblocking(False)
            tune(link.socket, self._stall_timeout * _STALLS)
        self._lock = threading.Lock()  # between abort() and close()
        self._closed = False
        self._owner = os.getpid()
        self._epoll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable forever after abort()
        self._epoll.register(self._alarm, select.EPOLLIN)

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close: of all connections, the epoll object and the alarm."""
        return [self._epoll.fileno(), self._alarm, *self._by_fd]

    def send(self, rank: int, *buffers: memoryview) -> Mark[TcpFlow]:
        link = next(self._to[rank])
        flow = link.outgoing
        flow.append(memoryview(self._header(buffers)))
        for buffer in buffers:
            flow.append(buffer)
        self._fresh.add(link)
        return flow, flow.queued

    def receive(self, rank: int, *buffers: memoryview) -> Mark[TcpFlow]:
        link = next(self._from[rank])
        flow = link.incoming
        link.expect(self._header(buffers))
        for buffer in buffers:
            flow.append(buffer)
        self._fresh.add(link)
        return flow, flow.queued

    def wait(self, marks: Iterable[Mark[TcpFlow]]) -> None:
        self._check()
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
            flow.link.stamp, flow.link.stalls = now, 0
        while missing:
            if self._between_hosts:
                self._await_bytes(missing)
            silent = min((flow.link for flow, _ in missing), key=lambda link: link.stamp)
            remaining = silent.stamp + self._stall_timeout - now
            if remaining <= 0:
                silent.stamp = now
                if not silent.receive_less():
                    silent.stalls += 1
                    self._tell(silent)
                missing = [mark for mark in missing if mark[0].done < mark[1]]
                continue
            events = self._epoll.poll(min(remaining, _LONGEST_POLL))
            now = time.monotonic()
            for fd, event in events:
                if fd == self._alarm:
                    raise Aborted("this communicator was aborted")
                link = self._by_fd[fd]
                link.stamp, link.stalls = now, 0
                if event & ~select.EPOLLOUT:
                    if link.incoming.buffers:
                        link.receive()
                    else:
                        self._ignore(link, event)
                if event & ~select.EPOLLIN and link.outgoing.buffers:
                    link.send()
                self._watch(link)
            missing = [mark for mark in missing if mark[0].done < mark[1]]

    def _await_bytes(self, missing: Iterable[Mark[TcpFlow]]) -> None:
        """Let the kernel wake this thread when a good part of what is missing has arrived."""
        for flow, position in missing:  # of several marks of a flow, the last one counts
            if flow is flow.link.incoming:
                flow.link.await_bytes(position - flow.done)

    def _tell(self, silent: TcpLink) -> None:
        """Report a peer that makes no progress. Raises PeerFailure if the network has lost its host."""
        seconds = silent.stalls * self._stall_timeout
        if silent.stalls >= _STALLS:
            for link in self._by_fd.values():
                if link.rank == silent.rank and link.lost():
                    raise link.silent()
        self._on_stall(Stall(silent.rank, seconds, silent.stalls, silent.ends))

    def _watch(self, link: TcpLink) -> None:
        """Register the events that the link waits for with epoll. Reads stay registered until unexpected data arrives, which
        saves system calls."""
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

    def _ignore(self, link: TcpLink, event: int) -> None:
        """Handle an event of a link on which this rank receives nothing now: the peer is ahead of this rank, or has left."""
        if event & select.EPOLLRDHUP and link.outgoing.buffers:
            raise link.failure()
        if event & (select.EPOLLHUP | select.EPOLLERR) and not link.outgoing.buffers:
            self._epoll.unregister(link.fd)  # epoll reports these events as long as a descriptor is registered
            link.registered = False
            link.interest = 0
        elif event & select.EPOLLIN:
            link.interest &= ~select.EPOLLIN
            self._epoll.modify(link.fd, link.interest)

    def abort(self) -> None:
        """End the present wait and every later one with :class:`Aborted`. Any thread may call it, any number of times."""
        with self._lock:
            self._aborted = True
            if not self._closed:
                os.eventfd_write(self._alarm, 1)

    def close(self) -> None:
        """Close all connections. Peers see it at once, even if a forked child still holds copies of the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._alarm)
        self._epoll.close()
        for link in self._by_fd.values():
            link.incoming.buffers.clear()
            link.outgoing.buffers.clear()
            if os.getpid() == self._owner:
                try:
                    link.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the peer has closed the connection first
            link.socket.close()
