"""One connection to a peer: buffers queued in both directions, moved as far as the kernel takes or has data now.

Only ``comm.tcp.transport`` uses it, and decides when to try. This module never waits, and writes only into buffers that were
queued.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from itertools import islice

from horovod._base.silent_host import ends_of, is_silence, silent_host_reason
from horovod.comm.base import PeerFailure
from horovod.comm.exchange.base import mismatch

_TCP_INFO = struct.Struct("4B")
"""The beginning of the kernel's ``tcp_info``: state, congestion state, retransmissions, probes."""
_PROBES = 3
_LONGEST_PROBE_SECONDS = 3600
_RETRANSMISSIONS = 3  # of the same bytes, after which the network counts as broken; by then they are seconds apart
_BUFFERS_AT_ONCE = 64  # per system call; the kernel's own limit is 1024
_UNIX_BUFFER_BYTES = 1 << 20  # measured: 64 MB between 2 ranks take a fifth less time than with the kernel's default
_WAKE_BYTES = 64 << 10
"""So many awaited bytes from another host are worth a wake-up: half of the kernel's first receive buffer, so that the window
does not close. A slow network delivers a few packets at a time. Measured with 11 MB among 4 hosts at 40 Mbit/s: the worker
thread needs 27 ms of processor time, and 60 if it wakes for everything, in the same time."""
_LEAST_WAKE_BYTES = 16 << 10  # for fewer, a system call to set the option costs more than it saves
_LOOPBACK_BUFFER_BYTES = 384 << 10  # measured: 64 MB take a third less time than with the kernel's own tuning


class TcpFlow:
    """One direction of a link: the buffers still to move, and how many bytes were queued and have moved in total."""

    __slots__ = ("buffers", "done", "link", "queued")

    def __init__(self, link: TcpLink) -> None:
        self.link = link
        self.buffers: deque[memoryview] = deque()
        self.queued = 0
        self.done = 0

    def append(self, buffer: memoryview) -> None:
        if buffer.nbytes:
            self.buffers.append(buffer)
            self.queued += buffer.nbytes

    def advance(self, count: int) -> None:
        """Record that the next ``count`` bytes have moved."""
        self.done += count
        buffers = self.buffers
        while count:
            size = buffers[0].nbytes
            if count < size:
                buffers[0] = buffers[0][count:]
                return
            buffers.popleft()
            count -= size


class TcpLink:
    """The connection to one peer."""

    __slots__ = (
        "blocked",
        "ends",
        "fd",
        "headers",
        "incoming",
        "interest",
        "outgoing",
        "rank",
        "registered",
        "socket",
        "stalls",
        "stamp",
        "wake_bytes",
    )

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.fd = connection.fileno()
        self.ends = ends_of(connection)
        self.wake_bytes = 1  # the kernel reports data when so many bytes have arrived
        self.outgoing = TcpFlow(self)
        self.incoming = TcpFlow(self)
        self.headers: deque[tuple[int, bytearray, bytes]] = deque()  # position in incoming, buffer, what it must hold
        self.interest = 0  # the epoll events for which the connection is registered now
        self.registered = False
        self.blocked = False  # whether the kernel took less than was offered
        self.stamp = 0.0  # when bytes last moved, a wait for this peer began, or a stall was reported
        self.stalls = 0  # how many stalls were reported since bytes last moved or the wait began

    def lost(self) -> bool:
        """Whether the network has lost the peer's host: the kernel retransmits, and the host does not acknowledge.

        A host acknowledges data even if its process does not read it, so a slow peer is never taken for a lost one.
        """
        if self.socket.family == socket.AF_UNIX:
            return False
        try:
            state = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return False
        retransmissions: int = _TCP_INFO.unpack(state)[2]
        return retransmissions >= _RETRANSMISSIONS

    def silent(self) -> PeerFailure:
        """The failure of a peer whose host does not answer; it is suspected, since another rank may know more."""
        return PeerFailure(self.rank, silent_host_reason(self.ends), suspected=True)

    def failure(self, error: OSError | None = None) -> PeerFailure:
        """Why the connection has ended, from ``error`` or from the kernel's present state."""
        if error is None:
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            error = OSError(number, os.strerror(number))
        if self.ends and is_silence(error):
            return self.silent()
        why = f"the connection to it was lost ({error.strerror})" if error.errno else "it closed its connection"
        return PeerFailure(self.rank, why)

    def expect(self, header: bytes) -> None:
        """Queue the receipt of this header. If another one arrives, :meth:`receive` raises the failure of the peer."""
        found = bytearray(len(header))
        self.incoming.append(memoryview(found))
        self.headers.append((self.incoming.queued, found, header))

    def send(self) -> None:
        """Write as much as the kernel takes now.

        Raises:
            PeerFailure: the connection has ended.
        """
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
                raise self.failure(error) from error
            self.outgoing.advance(count)
            if count < offered:
                self.blocked = True
                return

    def await_bytes(self, count: int) -> None:
        """Let the kernel report data only when ``count`` more bytes, or a good part of them, have arrived, but report a header
        at once.

        Args:
            count: the peer must send them without waiting for an answer to what it has sent before.
        """
        if not self.ends:
            return
        if self.headers:
            position, header, _ = self.headers[0]
            count = min(count, position - len(header) - self.incoming.done)
        wanted = min(count, _WAKE_BYTES) if count >= _LEAST_WAKE_BYTES else 1
        if wanted != self.wake_bytes:
            self.wake_bytes = wanted
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def receive_less(self) -> bool:
        """Read what has arrived and was not worth a report. Returns whether there was anything."""
        before = self.incoming.done
        if self.wake_bytes > 1:
            self.receive()
        return self.incoming.done > before

    def receive(self) -> None:
        """Read the data that has arrived, as far as buffers are queued for it.

        Raises:
            PeerFailure: the connection has ended, or the peer has sent a header that was not expected.
        """
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
                raise self.failure(error) from error
            if count == 0:
                raise self.failure()
            flow.advance(count)
            headers = self.headers
            while headers and headers[0][0] <= flow.done:
                _, found, expected = headers.popleft()
                if found != expected:
                    raise PeerFailure(self.rank, mismatch(bytes(found), expected))
            if count < wanted:
                return


def tune(connection: socket.socket, seconds: float) -> None:
    """Set a connection's options: within one host the size of the send buffer, so that data stays in the caches; between hosts
    keepalive probes, while the kernel chooses the size of buffers.

    Args:
        connection: a connected stream socket.
        seconds: after which the kernel breaks an idle connection to another host that acknowledges no probe. While data is
            sent, :meth:`TcpLink.lost` detects a lost host. TCP_USER_TIMEOUT would also break connections to a peer that
            computes and reads nothing for so long.
    """
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each = min(_LONGEST_PROBE_SECONDS, max(1, round(seconds / (_PROBES + 1))))
        for option, value in ((socket.TCP_KEEPIDLE, each), (socket.TCP_KEEPINTVL, each), (socket.TCP_KEEPCNT, _PROBES)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        pass  # the peer is already gone: the first transfer reports its rank
