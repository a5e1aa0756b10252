"""Step 5: a job that hangs, and how to find out why. The numbered line is the mistake.

HOROVOD_STALL_CHECK_TIME_SECONDS=2 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=4 horovodrun -np 2 python step_5_hangs.py
"""

import torch

import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(64, 10)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(5):
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    right = torch.tensor(0.1 * (epoch + 2) + 0.05 * hvd.rank())  # each rank tests on images of its own
    if right < 0.42:  # 1: each rank decides by itself whether the mean is still of interest
        hvd.allreduce(right, name="accuracy")
