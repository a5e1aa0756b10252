"""Lightning's ``Trainer`` in an elastic job: each round has a new trainer, and goes on with the model that the ranks have.

    horovodrun -np 3 --min-np 2 python lightning_elastic.py
    horovodrun -np 3 --min-np 2 python lightning_elastic.py --lose-a-rank

A trainer reads the number of ranks once, so the training function makes one, in each round. Model, optimizer and position in
the data are in the state. Lines with a number are what a script with a ``Trainer`` needs. The script trains on scikit-learn's
handwritten digits, and prints the accuracy on test digits after each epoch.

Needs the extras ``torch``, ``examples`` and ``integrations``. Takes less than a minute on two cores.
"""

import argparse
import os
import signal
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""
BATCH = 32


class Round(LightningEnvironment):  # 1: Lightning gets the numbers of the present round, and one device in each process
    creates_processes_externally = True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return 0  # of the devices that the trainer gets

    def set_world_size(self, size: int) -> None:
        pass  # what Lightning makes of the number of its devices

    def set_global_rank(self, rank: int) -> None:
        pass

    def teardown(self) -> None:
        pass  # WORLD_SIZE is the launcher's


class Digits(lightning.LightningModule):
    """A perceptron that reads a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer  # 2: the same in each round, with its momentum


class Commits(lightning.Callback):  # 3: commits after each step; a loss costs no more than the work after that
    def __init__(self, state: Any, unseen: tuple[torch.Tensor, torch.Tensor], lose_a_rank: bool) -> None:
        self.state, self.unseen, self.lose_a_rank = state, unseen, lose_a_rank
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *_: Any) -> None:
        signal.signal(
            signal.SIGTERM, self.handler
        )  # 4: a rank that is preempted leaves at a commit; Lightning would raise

    def on_before_optimizer_step(self, trainer: lightning.Trainer, *_: Any) -> None:
        first_of_three = (trainer.global_rank, trainer.world_size) == (0, 3)
        if self.lose_a_rank and first_of_three and self.state.epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

    def on_train_batch_end(
        self, trainer: lightning.Trainer, model: lightning.LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        state = self.state
        state.sampler.record_batch(number, BATCH)
        if trainer.is_last_batch:
            images, labels = self.unseen
            with torch.no_grad():
                right = (model.layers(images).argmax(1) == labels).float().mean()
            if trainer.is_global_zero:
                print(f"epoch {state.epoch + 1}: accuracy {right:.3f} on {trainer.world_size} ranks")
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lose-a-rank", action="store_true", help="rank 0 is killed in the second epoch")
    options = parser.parse_args()
    dist.init_process_group("horovod")

    torch.manual_seed(1)
    images, labels = load()
    seen, unseen = TensorDataset(images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])
    model = Digits()
    sampler = hvd.elastic.ElasticSampler(seen)  # 5: goes on within an epoch, with any number of ranks
    loader = DataLoader(seen, batch_size=BATCH, sampler=sampler)
    state = hvd.elastic.TorchState(model, model.optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=DDPStrategy(process_group_backend="horovod", cluster_environment=Round()),
            use_distributed_sampler=False,  # 6: ElasticSampler has divided the data
            max_epochs=options.epochs - state.epoch,
            callbacks=[Commits(state, unseen, options.lose_a_rank)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)

    train(state)
    dist.destroy_process_group()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
