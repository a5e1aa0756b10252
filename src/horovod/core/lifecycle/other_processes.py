"""Finds ranks whose processes have ended, also after all have left the job. MPI's start and its ``Finalize`` wait for all
processes, without a time limit, so a waiting rank asks here. On this host it looks at the process. For another host it looks at
the connection of the liveness monitor, which both sides keep until they end: then the kernel closes it. A rank that gives up
ends, the others see that, and in the end all of them end.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence

from horovod.control.fd_limit import make_room
from horovod.control.mesh import Endpoint
from horovod.control.processes import ended
from horovod.core.negotiation.agreement import list_ranks

_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class OtherProcesses:
    """The processes of the other ranks of one job.

    Args:
        rank: this one.
        endpoints: by rank, its endpoint.
    """

    def __init__(self, rank: int, endpoints: Sequence[Endpoint]) -> None:
        own = endpoints[rank].process_namespace
        self._visible = {
            other.rank: other.pid
            for other in endpoints
            if own and own == other.process_namespace and other.rank != rank
        }
        self._connections: dict[int, socket.socket] = {}

    def keep(self, connections: Mapping[int, socket.socket]) -> None:
        """Keep duplicates of the connections with ranks that cannot be seen. They are never read.

        Raises:
            DescriptorLimitError: the hard limit on open files is too low.
        """
        self.close()
        unseen = {rank: connection for rank, connection in connections.items() if rank not in self._visible}
        make_room(len(unseen), "MPI among ranks of several hosts")
        for rank, connection in unseen.items():
            self._connections[rank] = connection.dup()

    def gone(self) -> str:
        """The ranks whose processes have ended, as text such as "rank 3"; "" if none is known to have ended."""
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in ranks:
            poll.register(descriptor, _CLOSED)
        found = [*ended(self._visible), *(ranks[descriptor] for descriptor, _ in poll.poll(0))]
        return list_ranks(found) if found else ""

    def close(self) -> None:
        """Close what is kept."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [connection.fileno() for connection in self._connections.values()]
