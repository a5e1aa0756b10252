"""PyTorch Lightning on Horovod's engines: its DDP strategy has the name of the back end.

    horovodrun -np 2 python examples/lightning_digits.py
    python examples/lightning_digits.py

Without a launcher, Lightning starts the second process itself. The script trains on scikit-learn's handwritten digits.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


class Digits(lightning.LightningModule):
    """A perceptron that reads a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        right = (self.layers(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2, help="how many ranks")
    options = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    images, labels = load()
    seen = DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True)
    unseen = DataLoader(TensorDataset(images[TRAINING:], labels[TRAINING:]), batch_size=60)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=DDPStrategy(process_group_backend=options.backend),
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, seen)
    (found,) = trainer.validate(model, unseen, verbose=False)
    if trainer.is_global_zero:
        backend = torch.distributed.get_backend()
        print(f"accuracy {found['accuracy']:.3f} on {trainer.world_size} ranks by {backend}")


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
