"""The engine over stream sockets: for any hosts, without a library to install; also for ranks of one host that cannot share
memory."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

from horovod.comm.base import OnStall, give_up
from horovod.comm.exchange.communicator import PIECE_BYTES, ExchangeCommunicator
from horovod.comm.exchange.tree_reduction import MESSAGE_BYTES
from horovod.comm.tcp.transport import TcpExchange


class TcpCommunicator(ExchangeCommunicator):
    """One rank of a group whose ranks are connected pairwise.

    Args:
        rank: this rank's index in the group.
        sockets: a connected, authenticated stream socket (TCP or AF_UNIX) to every other rank, by index. This object owns them
            from now on, and those of ``more``.
        stall_timeout: how long a peer may make no progress inside a collective.
        on_stall: called when a peer has made no progress for ``stall_timeout``.
        piece_bytes: bytes that a rank sends to one other rank at a time during a reduction; the same on all ranks.
        message_bytes: how many bytes cost as much as a message; the same on all ranks.
        more: further connections to other ranks, over further networks, by index; both ends have them in the same order.
        between_hosts: whether some ranks are on other hosts; the same on all ranks.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        stall_timeout: timedelta,
        on_stall: OnStall = give_up,
        piece_bytes: int = PIECE_BYTES,
        message_bytes: int = MESSAGE_BYTES,
        more: Mapping[int, Sequence[socket.socket]] | None = None,
        between_hosts: bool = False,
    ) -> None:
        exchange = TcpExchange(sockets, stall_timeout, on_stall, more or {})
        super().__init__(rank, len(sockets) + 1, exchange, piece_bytes, bool(more), message_bytes, between_hosts)
