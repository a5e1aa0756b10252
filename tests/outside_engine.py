"""An engine as a package of somebody else would bring it: collectives of bytes over the sockets that the group opens.

It is here for tests of the entry point ``horovod.engines``; it is correct, and not fast.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from horovod.comm.base import Aborted, PeerFailure
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.bytewise.communicator import BytewiseCommunicator
from horovod.comm.datatypes import Array
from horovod.comm.engine import Bootstrap, Engine, EngineGroup


class SocketCollectives(ByteCollectives):
    """Each collective runs when it is started, with a thread for each peer that is sent something."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = peers
        self._aborted = False

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Any:
        threads = [threading.Thread(target=self._send, args=(rank, sends[rank])) for rank in self._peers]
        for thread in threads:
            thread.start()
        try:
            for rank, peer in self._peers.items():
                view = memoryview(receives[rank])
                while view:
                    received = peer.recv_into(view)
                    if not received:
                        raise Aborted("aborted") if self._aborted else PeerFailure(rank, "its connection broke", True)
                    view = view[received:]
        finally:
            for thread in threads:
                thread.join()

    def _send(self, rank: int, data: Array) -> None:
        try:
            self._peers[rank].sendall(data)
        except OSError:
            pass  # what is received says so

    def gather(self, own: Array, receives: Sequence[Array], longest: int) -> Any:
        self.exchange([own] * len(receives), receives, longest)

    def broadcast(self, data: Array, root: int) -> Any:
        nothing, size = data[:0], len(self._peers) + 1
        sends = [data if self._rank == root else nothing] * size
        self.exchange(sends, [data if rank == root else nothing for rank in range(size)], len(data))

    def wait(self, started: Any) -> None:
        if self._aborted:
            raise Aborted("aborted")

    def abort(self) -> None:
        self._aborted = True
        for peer in self._peers.values():
            peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class OutsideCommunicator(BytewiseCommunicator):
    name: ClassVar[str] = "outside"


class OutsideEngine(Engine):
    name: ClassVar[str] = "outside"

    def obstacle(self, group: EngineGroup) -> str:
        return ""

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> OutsideCommunicator:
        return OutsideCommunicator(group.rank, group.size, SocketCollectives(group.rank, group.connect()))
