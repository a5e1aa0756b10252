"""Chooses and builds the engine ``tcp``, which can serve any group: it connects all ranks with one another."""

from __future__ import annotations

from typing import ClassVar

from horovod.comm.engine import Bootstrap, Engine, EngineGroup
from horovod.comm.tcp.communicator import TcpCommunicator


class TcpEngine(Engine):
    """Serves ranks of any hosts that can reach one another."""

    name: ClassVar[str] = "tcp"

    def obstacle(self, group: EngineGroup) -> str:
        return ""

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> TcpCommunicator:
        connections = group.connect_all()
        first = {rank: some[0] for rank, some in connections.items()}
        more = {rank: some[1:] for rank, some in connections.items() if len(some) > 1}
        between_hosts, settings = len(set(group.hosts)) > 1, group.settings
        return TcpCommunicator(
            group.rank, first, settings.stall_timeout, group.on_stall, more=more, between_hosts=between_hosts
        )
