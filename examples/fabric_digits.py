"""Lightning Fabric on Horovod's engines: a plain training loop, and a strategy with the name of the back end.

    horovodrun -np 2 python examples/fabric_digits.py

The script trains on scikit-learn's handwritten digits, and prints the accuracy on test digits.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2, help="how many ranks")
    options = parser.parse_args()

    strategy = DDPStrategy(process_group_backend=options.backend)
    fabric = Fabric(accelerator="cpu", devices=options.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    images, labels = load()
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model, optimizer = fabric.setup(layers, torch.optim.Adam(layers.parameters(), lr=2e-3))
    seen = DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True)
    unseen = DataLoader(TensorDataset(images[TRAINING:], labels[TRAINING:]), batch_size=60)
    seen, unseen = fabric.setup_dataloaders(seen, unseen)

    for _ in range(options.epochs):
        for inputs, targets in seen:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    with torch.no_grad():
        right = torch.cat([(model(inputs).argmax(1) == targets).float() for inputs, targets in unseen])
    accuracy = fabric.all_gather(right).mean()
    backend = torch.distributed.get_backend()
    fabric.print(f"accuracy {accuracy:.3f} on {fabric.world_size} ranks by {backend}")


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
