"""A process whose default group of torch.distributed changes its members: what the tests of it call in each rank.

PyTorch has functions for it from 2.14 on. Before, the group of the back end ``horovod`` is made with an option, and its methods
are called, which those functions call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

import horovod.torch  # noqa: F401  it registers the back end
from time_limits import SOON

dist: Any = torch.distributed
BY_PYTORCH = hasattr(dist, "_reconfigure")


class Member:
    """One process, and its default group.

    Args:
        rank, size: the numbers that the group has before it has members.
        store: the store that all processes share.
        backend: of the group.
    """

    def __init__(self, rank: int, size: int, store: Any, backend: str = "horovod") -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self.store = rank, size, store
        option: dict[str, Any] = (
            {"enable_reconfigure": True} if BY_PYTORCH else {"pg_options": SimpleNamespace(enable_reconfigure=True)}
        )
        dist.init_process_group(
            backend, store=self.store, rank=rank, world_size=size, timeout=timedelta(seconds=SOON), **option
        )
        self.group = dist.group.WORLD

    @property
    def backend(self) -> Any:
        """What C++ code calls; before 2.15 the group itself."""
        implementation = getattr(dist, "get_backend_impl", None)
        return self.group if implementation is None else implementation(self.group, torch.device("cpu"))

    def supported(self) -> bool:
        return bool(dist._supports_reconfigure() if BY_PYTORCH else self.group.supports_reconfigure)

    def handle(self) -> str:
        return str(dist._get_reconfigure_handle() if BY_PYTORCH else self.group.get_reconfigure_handle())

    def handles(self, key: str, ranks: Sequence[int] | None = None) -> list[str]:
        """The handles of these processes, which all call this; of all by default."""
        self.store.set(f"{key}/{self.rank}", self.handle())
        return [self.store.get(f"{key}/{rank}").decode() for rank in (range(self.size) if ranks is None else ranks)]

    meet = handles

    def reconfigure(self, uuid: int, handles: Sequence[str], seconds: float = SOON) -> None:
        limit = timedelta(seconds=seconds)
        if BY_PYTORCH:
            work = dist._reconfigure(uuid, list(handles), timeout=limit)
        else:
            work = self.group.reconfigure(SimpleNamespace(uuid=uuid, handles=list(handles), timeout=limit, hints={}))
        work.wait()

    def join_all(self, uuid: int, key: str) -> None:
        """Make all processes members, in their order, and check that they are. All call it."""
        self.reconfigure(uuid, self.handles(key))
        assert self.members() == list(range(self.size))

    def members(self) -> list[int]:
        """The processes of the group by rank, as its collectives and messages say."""
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (self.group.rank(), self.group.size()) == (rank, size)
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(gathered, torch.tensor([self.rank]))
        found = [int(each) for each in gathered]
        assert found[rank] == self.rank
        total = torch.zeros(self.size)
        total[self.rank] = 1
        dist.all_reduce(total)
        assert total.nonzero().flatten().tolist() == sorted(found) and int(total.sum()) == size
        first = torch.tensor([self.rank])
        dist.broadcast(first, size - 1)
        assert first.item() == found[-1]
        received = torch.full((1,), -1)
        if size > 1:
            sending = dist.isend(torch.tensor([self.rank]), (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            sending.wait()
            assert received.item() == found[rank - 1]
        dist.barrier()  # a rank that ends the group now would end messages of the others
        return found

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
