"""A communicator that forwards every collective to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.comm.base import Communicator, Completion
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors
from horovod.comm.tuned import TunedSettings


class ForwardingCommunicator(Communicator):
    """Forwards every collective to another communicator of the same ranks.

    Args:
        target: the communicator that carries out the collectives. This object owns it from now on.
    """

    def __init__(self, target: Communicator) -> None:
        super().__init__(target.rank, target.size)
        self.target = target
        self.any_thread = target.any_thread
        self.compresses = target.compresses

    def forward(self, collective: Callable[..., Completion], *arguments: object) -> Completion:
        """Carry out a collective of the target. Subclasses override this to handle its errors."""
        return collective(*arguments)

    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> Completion:
        return self.forward(self.target.allreduce, inputs, outputs, op, prescale, postscale)

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> Completion:
        return self.forward(self.target.allreduce_compressed, inputs, outputs, prescale, postscale, form, errors)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> Completion:
        return self.forward(self.target.allgather, inputs, outputs, counts)

    def broadcast(self, vectors: Vectors, root: int) -> Completion:
        return self.forward(self.target.broadcast, vectors, root)

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> Completion:
        return self.forward(self.target.alltoall, source, target, sent, received, longest)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> Completion:
        return self.forward(self.target.reducescatter, inputs, outputs, counts, op, prescale, postscale)

    def barrier(self) -> Completion:
        return self.forward(self.target.barrier)

    def tune(self, settings: TunedSettings) -> None:
        self.target.tune(settings)

    def abort(self) -> None:
        self.target.abort()

    def may_still_read(self) -> bool:
        return self.target.may_still_read()

    def may_still_write(self) -> bool:
        return self.target.may_still_write()

    def engines(self) -> list[str]:
        return self.target.engines()

    def descriptors(self) -> list[int]:
        return self.target.descriptors()

    def close(self) -> None:
        self.target.close()
