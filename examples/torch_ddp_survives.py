"""Train a small network with DistributedDataParallel, in a job that goes on when a rank is lost. Nothing here is special.

    horovodrun -np 4 --min-np 2 --torch-backend horovod --on-loss continue python examples/torch_ddp_survives.py

Kill one of the processes that it prints, other than rank 0's: the others go on.

Needs the extra ``torch``. Takes less than a minute on two cores.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps, to have time to kill a rank")
args = parser.parse_args()

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
torch.manual_seed(0)
inputs = torch.randn(512, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(2)
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item(), 1.0])
        time.sleep(args.pause)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, {dist.get_world_size()} ranks", flush=True)
dist.destroy_process_group()
