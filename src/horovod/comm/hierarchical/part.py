"""An engine of some of a group's ranks, whose failures name the ranks as the whole group numbers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from horovod.comm.base import Communicator, Completion, PeerFailure
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors
from horovod.comm.tuned import TunedSettings


class Part(Communicator):
    """A communicator of ``ranks`` (indices in the group, in the communicator's order). Owns it."""

    name: ClassVar[str] = "part"

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._communicator = communicator
        self._ranks = ranks

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        try:
            yield
        except PeerFailure as failure:
            raise PeerFailure(self._ranks[failure.rank], failure.reason, failure.suspected) from failure

    def allreduce(
        self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float
    ) -> Completion:
        with self._numbered():
            return self._communicator.allreduce(inputs, outputs, op, prescale, postscale)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> Completion:
        with self._numbered():
            return self._communicator.allgather(inputs, outputs, counts)

    def broadcast(self, vectors: Vectors, root: int) -> Completion:
        with self._numbered():
            return self._communicator.broadcast(vectors, root)

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> Completion:
        with self._numbered():
            return self._communicator.alltoall(source, target, sent, received, longest)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> Completion:
        with self._numbered():
            return self._communicator.reducescatter(inputs, outputs, counts, op, prescale, postscale)

    def barrier(self) -> Completion:
        with self._numbered():
            return self._communicator.barrier()

    def abort(self) -> None:
        self._communicator.abort()

    def may_still_read(self) -> bool:
        return self._communicator.may_still_read()

    def may_still_write(self) -> bool:
        return self._communicator.may_still_write()

    def tune(self, settings: TunedSettings) -> None:
        self._communicator.tune(settings)

    def engines(self) -> list[str]:
        return self._communicator.engines()

    def descriptors(self) -> list[int]:
        return self._communicator.descriptors()

    def close(self) -> None:
        self._communicator.close()
