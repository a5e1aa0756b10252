"""Ray Train in an elastic job: Ray replaces a worker that is lost, and the others do not stop.

    python ray_train_elastic.py
    python ray_train_elastic.py --lose-a-rank

Ray starts the ranks. The script trains on scikit-learn's handwritten digits with DistributedDataParallel, reports each epoch to
Ray with a checkpoint, and prints the accuracy on test digits, at the end as Ray's result: the last epoch is reported when all
workers train. Lines with a number are what makes ``ray_train_digits.py`` elastic.

Needs the extras ``torch`` and ``examples``, and ``pip install 'ray[train]'``. Takes about a minute on two cores.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from horovod.ray.train.torch import TorchConfig  # 1


def train(options: dict[str, Any]) -> None:
    """Runs on a rank."""
    import os
    import signal
    import tempfile
    import time

    import ray.train.torch
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    import horovod.torch as hvd

    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    seen = TensorDataset(inputs[:1437], targets[:1437])
    sampler = hvd.elastic.ElasticSampler(seen)  # 2: goes on within an epoch, with any number of ranks
    loader = DataLoader(seen, batch_size=32, sampler=sampler)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # 3: what all ranks have in common

    def report(epoch: int) -> None:
        with torch.no_grad():
            right = (model.module(inputs[1437:]).argmax(1) == targets[1437:]).float().mean().item()
        ranks = dist.get_world_size()
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if dist.get_rank() == 0:  # any rank may: all have the same model
                print(f"epoch {epoch}: accuracy {right:.3f} on {ranks} ranks")
                torch.save(model.module.state_dict(), Path(folder) / "model.pt")
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "accuracy": right, "ranks": ranks}, checkpoint=saved)

    @hvd.elastic.run  # 4: called again when ranks were lost or have come
    def train_epochs(state: Any) -> None:
        while state.epoch < options["epochs"]:
            for number, (batch, digits) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(batch), digits)
                loss.backward()
                lost = Path(options["lost"])
                if options["lose_a_rank"] and (state.epoch, number, dist.get_rank()) == (1, 5, 1) and not lost.exists():
                    lost.touch()
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
                optimizer.step()
                sampler.record_batch(number, batch_size=32)
                time.sleep(options["pause"])  # a step of a larger model takes as long
                state.commit()  # 5: a loss costs no more than the work after this line
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            if state.epoch < options["epochs"]:
                report(state.epoch)
        while dist.get_world_size() < ray.train.get_context().get_world_size():  # 6: the last report takes all workers
            time.sleep(0.2)
            state.check_host_updates()  # Ray's new worker joins here
        report(state.epoch)

    train_epochs(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lose-a-rank", action="store_true", help="rank 1 is killed in the second epoch")
    parser.add_argument(
        "--pause", type=float, default=0.05, help="seconds after each step, so that there is time to join"
    )
    parser.add_argument("--folder", default="/tmp/ray_train_elastic", help="where Ray keeps its results")
    options = parser.parse_args()
    ray.init(num_cpus=options.workers + 1)
    lost = Path(f"{options.folder}.lost")  # it is there when the rank has been killed
    lost.unlink(missing_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "lost": str(lost)},
        torch_config=TorchConfig(min_workers=1),  # 7: with so many the others go on
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            storage_path=options.folder, failure_config=FailureConfig(max_failures=3)
        ),  # 8: replacements
    )
    result = trainer.fit()
    print(result.metrics, result.checkpoint)
    ray.shutdown()


if __name__ == "__main__":
    main()
