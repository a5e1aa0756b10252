"""What a type checker sees of scripts that use Horovod. Checked by ``make lint``, never run."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import horovod.keras
import horovod.tensorflow
import horovod.torch as hvd


def train(model: torch.nn.Module, loss_of: Any) -> torch.Tensor:
    hvd.init()
    assert_type(hvd.size() + hvd.local_rank(), int)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), op=hvd.Average)
    assert_type(optimizer, torch.optim.SGD)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    @hvd.elastic.run
    def steps(state: Any) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        state.commit()

    steps(hvd.elastic.TorchState(model=model, optimizer=optimizer))
    some = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async(torch.ones(3), name="ones", op=hvd.Sum, process_set=some)
    hvd.synchronize(handle)
    assert_type(hvd.allgather(torch.ones(3)), torch.Tensor)
    return hvd.allreduce(torch.ones(3), name="ones")


assert_type(horovod.tensorflow.rank(), int)
assert_type(horovod.keras.rank(), int)
