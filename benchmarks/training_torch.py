"""The steps that ``training.py`` measures of PyTorch."""

from __future__ import annotations

import inspect

import torch
from training_arrangements import DDP_VIEWS, WITH_DDP, WITH_HVD, Training, timed
from workloads_torch import WORKLOADS

_DDP_OPTIONS = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
BUFFERS_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
"""What DDP calls the broadcast of running statistics; renamed in PyTorch 2.13."""


def prepare(arrangement: str, model_name: str) -> Training:
    """The training step as the arrangement's users write it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    workload = WORKLOADS[model_name]()
    model = workload.model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if arrangement in WITH_HVD:
        import horovod.torch as hvd  # here, so that the plain arrangements are without it

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    elif arrangement in WITH_DDP:
        torch.distributed.init_process_group("gloo")
        # Horovod leaves running statistics to each rank; broadcasting them in every step would be work it does not do.
        model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=arrangement == DDP_VIEWS, **{BUFFERS_OPTION: False}
        )

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()

    return Training(timed(step), workload.parameters, len(list(workload.model.parameters())))
