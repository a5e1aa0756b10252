"""Hugging Face Accelerate on Horovod's engines.

    horovodrun -np 2 python examples/accelerate_digits.py
    horovodrun -np 2 --torch-backend horovod python examples/accelerate_digits.py --backend gloo

On CPUs, Accelerate accepts only Gloo, but it uses an existing process group, so the script makes one first. With the second
command, Accelerate makes the group, and ``--torch-backend`` replaces Gloo by Horovod. The script trains on scikit-learn's
handwritten digits, and prints the accuracy on test digits.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    if options.backend != "gloo":
        dist.init_process_group(options.backend)
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    images, labels = load()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True)
    unseen = DataLoader(TensorDataset(images[TRAINING:], labels[TRAINING:]), batch_size=60)
    model, optimizer, seen, unseen = accelerator.prepare(model, optimizer, seen, unseen)

    for _ in range(options.epochs):
        for inputs, targets in seen:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    right = []
    with torch.no_grad():
        for inputs, targets in unseen:
            found, wanted = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
            right.append((found == wanted).float())
    ranks, backend = accelerator.num_processes, dist.get_backend()
    accelerator.print(f"accuracy {torch.cat(right).mean():.3f} on {ranks} ranks by {backend}")
    dist.destroy_process_group()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
