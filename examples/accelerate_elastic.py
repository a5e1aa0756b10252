"""Accelerate in an elastic job: each round has a new ``Accelerator``, and goes on with the model that the ranks have.

    horovodrun -np 3 --min-np 2 python accelerate_elastic.py
    horovodrun -np 3 --min-np 2 python accelerate_elastic.py --lose-a-rank

Accelerate reads the number of ranks once, and keeps it for the process, so the training function has it read them again in each
round. Model, optimizer and position in the data are in the state. Lines with a number are what a script with Accelerate needs.
The script trains on scikit-learn's handwritten digits, and prints the accuracy on test digits after each epoch.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""
BATCH = 32


def accelerator_of_this_round() -> Accelerator:  # 1: what Accelerate keeps for the process is of the round before
    AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate calls it internal, and has nothing else
    GradientState._reset_state()
    return Accelerator(cpu=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lose-a-rank", action="store_true", help="rank 0 is killed in the second epoch")
    options = parser.parse_args()
    dist.init_process_group("horovod")

    torch.manual_seed(1)
    images, labels = load()
    seen = TensorDataset(images[:TRAINING], labels[:TRAINING])
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sampler = hvd.elastic.ElasticSampler(seen)  # 2: divides the data instead of Accelerate, and goes on within an epoch
    loader = DataLoader(seen, batch_size=BATCH, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # 3: the plain model and optimizer

    @hvd.elastic.run
    def train(state: Any) -> None:
        accelerator = accelerator_of_this_round()
        wrapped, stepper = accelerator.prepare(model, optimizer)  # 4: in each round, and not the loader
        while state.epoch < options.epochs:
            for number, (inputs, targets) in enumerate(loader):
                stepper.zero_grad()
                loss = F.cross_entropy(wrapped(inputs), targets)
                first_of_three = (accelerator.process_index, accelerator.num_processes) == (0, 3)
                if options.lose_a_rank and (state.epoch, number) == (1, 5) and first_of_three:
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
                accelerator.backward(loss)
                stepper.step()
                sampler.record_batch(number, BATCH)
                state.commit()  # 5: a loss costs no more than the work after this line
            with torch.no_grad():
                right = (model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()
            accelerator.print(f"epoch {state.epoch + 1}: accuracy {right:.3f} on {accelerator.num_processes} ranks")
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    dist.destroy_process_group()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
