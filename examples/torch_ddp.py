"""DistributedDataParallel on Horovod's engines: a script for torchrun, with another name of the back end.

    horovodrun -np 2 python torch_ddp.py
    torchrun --nproc-per-node 2 torch_ddp.py

The script trains on scikit-learn's handwritten digits, and prints the accuracy on test digits. Compare with ``--backend gloo``.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    torch.manual_seed(1)

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    seen, unseen = TensorDataset(inputs[:1500], targets[:1500]), TensorDataset(inputs[1500:], targets[1500:])
    sampler = DistributedSampler(seen)
    loader = DataLoader(seen, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, digits in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), digits).backward()
            optimizer.step()

    mine = DataLoader(unseen, batch_size=64, sampler=DistributedSampler(unseen, shuffle=False))
    right = torch.zeros(2)
    with torch.no_grad():
        for batch, digits in mine:
            right += torch.tensor([(model.module(batch).argmax(1) == digits).sum(), len(digits)])
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"accuracy {right[0] / right[1]:.3f} on {dist.get_world_size()} ranks by {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
