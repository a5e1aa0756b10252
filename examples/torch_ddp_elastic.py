"""DistributedDataParallel in an elastic job: the same model object trains on with the ranks that are left.

    horovodrun -np 3 --min-np 2 python torch_ddp_elastic.py
    horovodrun -np 3 --min-np 2 python torch_ddp_elastic.py --lose-a-rank

The script trains on scikit-learn's handwritten digits, and prints the accuracy on test digits after each epoch. Lines with a
number are what makes ``torch_ddp.py`` elastic.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd  # 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lose-a-rank", action="store_true", help="rank 0 is killed in the second epoch")
    options = parser.parse_args()
    dist.init_process_group("horovod")
    torch.manual_seed(1)

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    seen = TensorDataset(inputs[:1500], targets[:1500])
    sampler = hvd.elastic.ElasticSampler(seen)  # 2: goes on within an epoch, with any number of ranks
    loader = DataLoader(seen, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # 3: what all ranks have in common

    @hvd.elastic.run  # 4: called again when ranks were lost or have come
    def train(state: Any) -> None:
        while state.epoch < options.epochs:
            for number, (batch, digits) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(batch), digits)
                first_of_three = (dist.get_rank(), dist.get_world_size()) == (0, 3)
                if options.lose_a_rank and (state.epoch, number) == (1, 5) and first_of_three:
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, batch_size=32)
                state.commit()  # 5: a loss costs no more than the work after this line
            with torch.no_grad():
                right = (model.module(inputs[1500:]).argmax(1) == targets[1500:]).float().mean()
            if dist.get_rank() == 0:
                print(f"epoch {state.epoch + 1}: accuracy {right:.3f} on {dist.get_world_size()} ranks")
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
