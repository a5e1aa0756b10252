"""Ray Train on Horovod's engines: its TorchTrainer has the name of the back end.

    python examples/ray_train_digits.py

Ray starts the ranks, and gives them the store for the group. The script trains on scikit-learn's handwritten digits, and prints
the accuracy on test digits.

Needs the extras ``torch`` and ``examples``, and ``pip install 'ray[train]'``. Takes less than a minute on two cores.
"""

import argparse

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(options: dict[str, int]) -> None:
    """Runs on a rank."""
    import ray.train.torch
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    seen = DataLoader(TensorDataset(inputs[:1437], targets[:1437]), batch_size=32, shuffle=True)
    seen = ray.train.torch.prepare_data_loader(seen)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(options["epochs"]):
        seen.sampler.set_epoch(epoch)
        for batch, digits in seen:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), digits).backward()
            optimizer.step()

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(1437 + rank, None, size)
    right = torch.tensor([(model(inputs[mine]).argmax(1) == targets[mine]).sum(), len(targets[mine])])
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right[0] / right[1]:.3f} on {size} ranks by {dist.get_backend()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", help="where Ray keeps its results; by default in the home directory")
    options = parser.parse_args()
    ray.init(num_cpus=options.workers + 1)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        torch_config=TorchConfig(backend=options.backend),
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=options.folder),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
