"""Who is measured: Horovod, and the libraries people would use in its place, behind one small interface.

Every contender lives in the same processes and calls its library as that library's users do. For an operation it
prepares one blocking call; the clock is elsewhere.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import horovod.torch as hvd

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


@dataclass(frozen=True)
class Prepared:
    """One blocking call, and where its result lies: in ``output``, or in what the call returns where that is None."""

    call: Callable[[], object]
    output: Tensor | None = None


class Unsupported(Exception):
    """This contender has no such operation."""


class Contender(ABC):
    """One library, ready to communicate between the ranks of this job."""

    name: str

    @abstractmethod
    def prepare(self, operation: str, tensor: Tensor, name: str) -> Prepared:
        """One call of ``operation`` on this rank's ``tensor``; reductions are sums, the root is rank 0.

        Raises:
            Unsupported: the library has no such operation.
        """

    @abstractmethod
    def prepare_average(self, tensor: Tensor, name: str) -> Prepared:
        """The call a user would write to average one tensor over the ranks."""

    @abstractmethod
    def prepare_burst(self, tensors: Sequence[Tensor], name: str) -> Prepared:
        """One call starts an in-place allreduce of every tensor, then waits for all."""

    @abstractmethod
    def prepare_object(self, message: object) -> Prepared:
        """One call broadcasts any Python object from rank 0."""


class Horovod(Contender):
    """``horovod.torch`` on the engine that HOROVOD_CPU_OPERATIONS names. Operations that change the size make a new tensor."""

    name = "horovod"

    def prepare(self, operation: str, tensor: Tensor, name: str) -> Prepared:
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name),
            "allgather": lambda: hvd.allgather(tensor, name=name),
            "broadcast": lambda: hvd.broadcast_(tensor, root_rank=0, name=name),
            "alltoall": lambda: hvd.alltoall(tensor, name=name),
            "reducescatter": lambda: hvd.reducescatter(tensor, op=hvd.Sum, name=name),
        }
        return Prepared(calls[operation])

    def prepare_average(self, tensor: Tensor, name: str) -> Prepared:
        return Prepared(lambda: hvd.allreduce(tensor, name=name))

    def prepare_burst(self, tensors: Sequence[Tensor], name: str) -> Prepared:
        names = [f"{name}.{index}" for index in range(len(tensors))]

        def call() -> None:
            handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
            for handle in handles:
                hvd.synchronize(handle)

        return Prepared(call, tensors[-1])

    def prepare_object(self, message: object) -> Prepared:
        return Prepared(lambda: hvd.broadcast_object(message, root_rank=0, name="object"))


class Peer(Contender):
    """A library that a user would call directly.

    Args:
        same_output: operations that change the size deliver into the same tensor every time, which Horovod's interface does not
            offer; else each makes a new one, as Horovod does.
    """

    def __init__(self, same_output: bool = False) -> None:
        self._same_output = same_output

    def _delivering(self, like: Tensor, length: int, deliver: Callable[[Tensor], object]) -> Prepared:
        """Calls of ``deliver`` with the tensor of this length to deliver into."""
        kept = like.new_zeros(length) if self._same_output else None

        def call() -> Tensor:
            output = like.new_empty(length) if kept is None else kept
            deliver(output)
            return output

        return Prepared(call)


class Gloo(Peer):
    """``torch.distributed`` with its Gloo backend, the default of PyTorch on CPUs."""

    name = "gloo"

    def __init__(self, same_output: bool = False) -> None:
        super().__init__(same_output)
        # Ranks of one host meet on loopback, whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, size = hvd.rank(), hvd.size()
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        port = hvd.broadcast_object(store.port if rank == 0 else 0, root_rank=0, name="gloo_port")
        if rank != 0:
            store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def prepare(self, operation: str, tensor: Tensor, name: str) -> Prepared:
        # PyTorch 2.13 gave two of these functions new names, and warns of the old ones.
        size = hvd.size()
        if operation == "allreduce":
            return Prepared(lambda: dist.all_reduce(tensor), tensor)
        if operation == "broadcast":
            return Prepared(lambda: dist.broadcast(tensor, src=0), tensor)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        into: dict[str, tuple[int, Callable[[Tensor, Tensor], object]]] = {
            "allgather": (len(tensor) * size, all_gather),
            "alltoall": (len(tensor), dist.all_to_all_single),
            "reducescatter": (len(tensor) // size, reduce_scatter),
        }
        if operation in into:
            length, deliver = into[operation]
            return self._delivering(tensor, length, lambda output: deliver(output, tensor))
        raise Unsupported(operation)

    def prepare_average(self, tensor: Tensor, name: str) -> Prepared:
        # Gloo has no average: its users, DDP among them, divide. The sum alone is timed, which favours Gloo.
        return self.prepare("allreduce", tensor, name)

    def prepare_burst(self, tensors: Sequence[Tensor], name: str) -> Prepared:
        def call() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        return Prepared(call, tensors[-1])

    def prepare_object(self, message: object) -> Prepared:
        def call() -> object:
            objects = [message]
            dist.broadcast_object_list(objects, src=0)
            return objects[0]

        return Prepared(call)


class Mpi(Peer):
    """The MPI under which the job was started, through mpi4py's buffer interface. Its name is that of the library."""

    name = "mpi"

    def __init__(self, same_output: bool = False) -> None:
        super().__init__(same_output)
        from mpi4py import MPI

        self.name = MPI.get_vendor()[0].lower().replace(" ", "")
        self.mpi: Any = MPI
        self.world: Any = MPI.COMM_WORLD
        if self.world.size != hvd.size():
            raise SystemExit(f"MPI sees {self.world.size} process(es), Horovod {hvd.size()}: start this under mpirun")

    def prepare(self, operation: str, tensor: Tensor, name: str) -> Prepared:
        if tensor.dtype.itemsize < 4:
            raise Unsupported(f"{operation} of {tensor.dtype}")
        size = hvd.size()
        world, array = self.world, tensor.numpy()
        if operation == "allreduce":
            return Prepared(lambda: world.Allreduce(self.mpi.IN_PLACE, array), tensor)
        if operation == "broadcast":
            return Prepared(lambda: world.Bcast(array, root=0), tensor)
        into: dict[str, tuple[int, Callable[[Any, Any], object]]] = {
            "allgather": (len(tensor) * size, world.Allgather),
            "alltoall": (len(tensor), world.Alltoall),
            "reducescatter": (len(tensor) // size, world.Reduce_scatter_block),
        }
        if operation in into:
            length, deliver = into[operation]
            return self._delivering(tensor, length, lambda output: deliver(array, output.numpy()))
        raise Unsupported(operation)

    def prepare_average(self, tensor: Tensor, name: str) -> Prepared:
        return self.prepare("allreduce", tensor, name)  # the sum alone, as for Gloo

    def prepare_burst(self, tensors: Sequence[Tensor], name: str) -> Prepared:
        arrays = [tensor.numpy() for tensor in tensors]

        def call() -> None:
            self.mpi.Request.Waitall([self.world.Iallreduce(self.mpi.IN_PLACE, array) for array in arrays])

        return Prepared(call, tensors[-1])

    def prepare_object(self, message: object) -> Prepared:
        return Prepared(lambda: self.world.bcast(message, root=0))


PEERS: dict[str, type[Peer]] = {"gloo": Gloo, "mpi": Mpi}


def verify(contender: Contender, operation: str) -> None:
    """Refuse to measure a wrong answer: one small call with known numbers, on every rank.

    Raises:
        SystemExit: the result is not the operation's; names the contender and the rank.
        Unsupported: the library has no such operation.
    """
    rank, size = hvd.rank(), hvd.size()
    inputs = [torch.arange(3.0 * size) + 100 * other for other in range(size)]
    expected = {
        "allreduce": sum(inputs[1:], inputs[0]),
        "allgather": torch.cat(inputs),
        "broadcast": inputs[0],
        "alltoall": torch.cat([each.chunk(size)[rank] for each in inputs]),
        "reducescatter": sum(inputs[1:], inputs[0]).chunk(size)[rank],
    }[operation]
    try:
        prepared = contender.prepare(operation, inputs[rank].clone(), f"verify.{operation}")
        result = prepared.call()
    except (RuntimeError, NotImplementedError) as error:
        if contender.name == Horovod.name:
            raise
        raise Unsupported(f"{operation}: {error}") from error
    delivered = result if prepared.output is None else prepared.output
    if not isinstance(delivered, Tensor) or not torch.equal(delivered, expected):
        raise SystemExit(f"rank {rank}: {contender.name} {operation} gave {delivered}, expected {expected}")
