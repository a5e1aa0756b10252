"""The ways of training that ``slow_links.py`` compares: how each makes a model and an optimizer, and averages tensors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ONE = "one host"
Made = tuple[nn.Module, Any, Callable[[], None]]
"""The model to call, the optimizer, and what is called after each step."""
EVERY, FRAGMENTS, DELAY = 50, 4, 5


class Alone:
    """One host."""

    every = 1
    """It communicates once in so many steps."""

    def begin(self) -> None: ...

    def make(self, model: nn.Module, lr: float) -> Made:
        return model, torch.optim.Adam(model.parameters(), lr), lambda: None

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks in place."""

    def barrier(self) -> None: ...

    def end(self) -> None: ...


class Horovod(Alone):
    """Averaged gradients, compressed or not."""

    def __init__(self, compression: str) -> None:
        self.compression = compression

    def begin(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd

    def make(self, model: nn.Module, lr: float) -> Made:
        hvd = self.hvd
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, self.optimizer(torch.optim.Adam(model.parameters(), lr), model), lambda: None

    def optimizer(self, plain: Any, model: nn.Module) -> Any:
        chosen = getattr(self.hvd.Compression, self.compression)
        return self.hvd.DistributedOptimizer(plain, model.named_parameters(), compression=chosen)

    def average(self, tensors: Sequence[Tensor]) -> None:
        self.hvd.grouped_allreduce_(list(tensors), name="average")

    def barrier(self) -> None:
        self.hvd.barrier()

    def end(self) -> None:
        self.hvd.barrier()
        self.hvd.shutdown()


class HorovodLocal(Horovod):
    """Local steps."""

    every = EVERY

    def optimizer(self, plain: Any, model: nn.Module) -> Any:
        return self.hvd.LocalOptimizer(
            plain,
            every=EVERY,
            fragments=FRAGMENTS,
            delay=DELAY,
            compression=getattr(self.hvd.Compression, self.compression),
            named_parameters=model.named_parameters(),
        )


class Ddp(Alone):
    """PyTorch's DistributedDataParallel on Gloo."""

    def __init__(self, hook: str = "") -> None:
        self.hook = hook

    def begin(self) -> None:
        dist.init_process_group("gloo")

    def make(self, model: nn.Module, lr: float) -> Made:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        whole = None
        if self.hook == "powersgd":
            # On Gloo it fails with several buckets: it sends from callbacks, in no certain order.
            whole, dist._DEFAULT_FIRST_BUCKET_BYTES = 1024, 1 << 30
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=whole)
        if self.hook == "fp16":  # that for bfloat16 refuses Gloo
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped, torch.optim.Adam(model.parameters(), lr), lambda: None

    def average(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            dist.all_reduce(each)
            each /= dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class PostLocalSgd(Ddp):
    """PyTorch's post-local SGD: averaged gradients in the first steps, then averaged parameters every so many."""

    every = EVERY

    def make(self, model: nn.Module, lr: float) -> Made:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        wrapped = nn.parallel.DistributedDataParallel(model)
        state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=EVERY)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=EVERY, warmup_steps=EVERY)
        return (
            wrapped,
            torch.optim.Adam(model.parameters(), lr),
            lambda: averager.average_parameters(model.parameters()),
        )


class Torchft(Ddp):
    """torchft's streaming DiLoCo in float32 (quantizing needs CUDA). A host is a replica group; host 0 has the lighthouse."""

    every = EVERY
    FRAGMENTS = (5, 2, 1)
    """Their number must divide EVERY. The first with which no fragment is empty is taken."""

    def begin(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # else the lighthouse logs every quorum
        from torchft.coordination import LighthouseServer

        super().begin()
        self.size = dist.get_world_size()
        where = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1000}"
        self.lighthouse = LighthouseServer(bind=where, min_replicas=self.size) if rank() == 0 else None
        self.where = f"http://{where}"

    def make(self, model: nn.Module, lr: float) -> Made:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        plain = torch.optim.Adam(model.parameters(), lr)
        own = os.environ["OWN_ADDR"]
        self.store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.size,
            use_async_quorum=False,  # DiLoCo refuses the other
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=self.where,
            replica_id=f"host{rank()}",
            hostname=own,
            init_sync=False,  # all begin with the same weights
        )
        choices = (in_parts(list(model.parameters()), count) for count in self.FRAGMENTS)
        parts = next(parts for parts in choices if all(parts))
        outer = [torch.optim.SGD(part, lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        fragments = [nn.ParameterList(part) for part in parts]
        DiLoCo(self.manager, fragments, plain, outer, EVERY, fragment_sync_delay=DELAY).__enter__()
        return model, plain, lambda: None

    def end(self) -> None:
        self.manager.shutdown(wait=False)
        super().end()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


def in_parts(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """So many parts with about the same number of elements, each of layers that follow each other, as a model's modules are,
    which torchft takes as fragments."""
    whole = sum(each.numel() for each in parameters)
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for each in parameters:
        parts[(before + each.numel() // 2) * count // whole].append(each)
        before += each.numel()
    return parts


CONTENDERS: dict[str, Callable[[], Alone]] = {
    ONE: Alone,
    "Horovod, float32": lambda: Horovod("none"),
    "Horovod, fp16": lambda: Horovod("fp16"),
    "Horovod, int8": lambda: Horovod("int8"),
    "Horovod, local, fp16": lambda: HorovodLocal("fp16"),
    "Horovod, local, int8": lambda: HorovodLocal("int8"),
    "DDP, float32": Ddp,
    "DDP, fp16 hook": lambda: Ddp("fp16"),
    "DDP, PowerSGD": lambda: Ddp("powersgd"),
    "DDP, post-local SGD": PostLocalSgd,
    "torchft, DiLoCo": Torchft,
}
"""By the name in tables."""


def installed() -> list[str]:
    """Names of the contenders that can run here: of torchft, only if it is installed."""
    there = importlib.util.find_spec("torchft") is not None
    return [name for name in CONTENDERS if there or not name.startswith("torchft")]


def rank() -> int:
    return int(os.environ["RANK"])
