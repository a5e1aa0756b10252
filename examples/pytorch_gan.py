"""Train two networks, each with its own optimizer: a generator draws digits, a discriminator distinguishes them from real ones.

    horovodrun -np 2 python examples/pytorch_gan.py

The generator's loss flows through the discriminator, so the generator's backward pass also computes gradients of the
discriminator. Horovod does not send these: they come after the discriminator's ``step()`` and before its next ``zero_grad()``,
which discards them. ``discriminator.requires_grad_(False)`` saves computing them; that helps in one process, too.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import horovod.torch as hvd

NOISE = 16
"""The number of random inputs from which the generator makes an image."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--report-every", type=int, default=10, metavar="EPOCHS")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # each rank uses different noise
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()
    )
    discriminator = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.4), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    generator_optimizer = distributed(generator)
    discriminator_optimizer = distributed(discriminator)
    digits = torch.from_numpy(load_digits().data).float() / 8 - 1  # (1797, 64), from -1 (paper) to 1 (ink)
    sampler = DistributedSampler(digits, hvd.size(), hvd.rank())
    loader = DataLoader(digits, batch_size=32, sampler=sampler)

    for epoch in range(1, options.epochs + 1):
        losses = torch.zeros(2)
        sampler.set_epoch(epoch)
        for real in loader:
            fake = generator(torch.randn(len(real), NOISE))

            # The discriminator's step. `detach` keeps it from reaching the generator.
            discriminator_optimizer.zero_grad()
            discriminator_loss = loss_of(discriminator(real), 0.9) + loss_of(discriminator(fake.detach()), 0.0)
            discriminator_loss.backward()
            discriminator_optimizer.step()

            # The generator's step. Gradients flow through the discriminator, whose parameters stay as they are.
            discriminator.requires_grad_(False)
            generator_optimizer.zero_grad()
            generator_loss = loss_of(discriminator(fake), 1.0)
            generator_loss.backward()
            generator_optimizer.step()
            discriminator.requires_grad_(True)

            losses += torch.stack([discriminator_loss.detach(), generator_loss.detach()])
        if epoch % options.report_every == 0 or epoch == 1:
            mean_discriminator, mean_generator = hvd.allreduce(losses / len(loader), name="losses").tolist()
            apart = hvd.allreduce(distance(generator, digits), name="distance").item()
            if hvd.rank() == 0:
                print(
                    f"epoch {epoch}: discriminator loss {mean_discriminator:.3f}, generator loss {mean_generator:.3f}, "
                    f"distance from real digits {apart:.3f}",
                    flush=True,
                )
    if hvd.rank() == 0:
        print(drawn(generator, 6))


def distributed(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer for one of the two networks, which starts from rank 0's weights on all ranks."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002, betas=(0.5, 0.999))
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def loss_of(scores: Tensor, wanted: float) -> Tensor:
    """The loss of the discriminator's ``scores``, (images, 1), whose targets are 1 for real images and 0 for drawn ones. A
    target a little below 1 keeps the discriminator from becoming certain: the generator learns nothing from a certain one.
    """
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


@torch.no_grad()
def distance(generator: nn.Module, digits: Tensor) -> Tensor:
    """How far drawings are from digits: the root mean square difference of every pixel's mean and standard deviation."""
    drawings = generator(torch.randn(1000, NOISE))
    means = drawings.mean(dim=0) - digits.mean(dim=0)
    deviations = drawings.std(dim=0) - digits.std(dim=0)
    return torch.cat([means, deviations]).square().mean().sqrt()


@torch.no_grad()
def drawn(generator: nn.Module, number: int) -> str:
    """Some drawings side by side, as text."""
    shades = " .:*#@"
    pixels = ((generator(torch.randn(number, NOISE)) + 1) / 2 * (len(shades) - 1)).round().int()
    rows = pixels.view(number, 8, 8).transpose(0, 1)  # (row, drawing, column)
    return "\n".join("   ".join("".join(2 * shades[p] for p in line) for line in row) for row in rows.tolist())


if __name__ == "__main__":
    main()
