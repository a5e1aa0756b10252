"""Train an ensemble of two models at the same time, each on half of the ranks.

    horovodrun -np 4 python examples/pytorch_process_sets.py    # ranks 0 and 1 train one model, 2 and 3 the other
    horovodrun -np 2 python examples/pytorch_process_sets.py    # one rank for each

Each half is a process set: a group of ranks with collectives of its own. An optimizer with ``process_set=`` averages gradients
over the set, so the two models are independent. The predictions for the test digits are averaged over all ranks. With one rank
there is one model.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    hvd.init(process_sets="dynamic")  # process sets are added below, when the number of ranks is known
    torch.set_num_threads(1)
    team, members = join_a_team()
    # The two models have different initial weights and a different order of the digits.
    torch.manual_seed(team)
    images, labels = load()
    training = TensorDataset(images[:TRAINING], labels[:TRAINING])
    sampler = DistributedSampler(training, members.size(), members.rank(), seed=team)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        named_parameters=model.named_parameters(),
        process_set=members,
    )
    # All members start from the weights of the set's first rank. root_rank is always a rank of the whole job.
    for name, tensor in model.state_dict().items():
        hvd.broadcast_(tensor, root_rank=members.ranks[0], name=name, process_set=members)

    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            opinion = model(images[TRAINING:]).softmax(dim=1)
        # Over all ranks: the average of the models' predictions is the ensemble's prediction.
        vote = hvd.allreduce(opinion, name="vote")
        report = [accuracy(opinion, labels[TRAINING:])] if members.rank() == 0 else []
        alone = [right for each in hvd.allgather_object(report) for right in each]
        if hvd.rank() == 0:
            models = " and ".join(f"{right:.2%}" for right in alone)
            print(
                f"epoch {epoch}: test accuracy alone {models}, together {accuracy(vote, labels[TRAINING:]):.2%}",
                flush=True,
            )


def join_a_team() -> tuple[int, hvd.ProcessSet]:
    """The number of this rank's half, 0 or 1, and the process set of its members."""
    if hvd.size() == 1:
        return 0, hvd.global_process_set
    middle = hvd.size() // 2
    # Every rank must add every set, also those that it does not belong to.
    halves = [hvd.add_process_set(range(middle)), hvd.add_process_set(range(middle, hvd.size()))]
    team = int(hvd.rank() >= middle)
    return team, halves[team]


def accuracy(opinion: torch.Tensor, labels: torch.Tensor) -> float:
    """The fraction of digits for which the largest of the probabilities, of shape (digits, 10), is the right one."""
    return (opinion.argmax(dim=1) == labels).float().mean().item()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
