"""Train on handwritten digits in the tasks of Spark.

    python examples/spark_mnist.py                                   # a cluster of two executors on this machine
    python examples/spark_mnist.py --master spark://host:7077
    python examples/spark_mnist.py --remote sc://host:15002          # a client of Spark Connect

The driver reads the images and passes them to ``horovod.spark.run`` like any other argument. Each rank trains on its part, and
the driver prints what rank 0 returns. Images come from ``--data``: ``digits`` (1,797 images that ship with scikit-learn, the
default), or the path of an ``.npz`` file with arrays ``x`` (images, height, width) and ``y`` (labels from 0). The last fifth is
for the test.

Needs the extras ``torch``, ``examples`` and ``spark``. The executors need them, too, and Java 17. Takes about
a minute on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np


def train(images: np.ndarray, labels: np.ndarray, epochs: int) -> dict[str, float]:
    """Runs on a rank. Returns the accuracy on the test images, which is the same on all ranks."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    inputs = torch.from_numpy(images).float().div(images.max()).unsqueeze(1)
    targets = torch.from_numpy(labels).long()
    seen = len(inputs) * 4 // 5
    side = images.shape[1] // 4
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    loss = torch.zeros(())
    for epoch in range(epochs):
        order = torch.randperm(seen, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):  # each rank takes its part of the same batches
            mine = batch[hvd.rank() :: hvd.size()]
            if len(batch) < hvd.size():
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[mine]), targets[mine])
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    mine = torch.arange(seen, len(inputs))[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        right = (model(inputs[mine]).argmax(1) == targets[mine]).sum()
    counts = hvd.allreduce(torch.tensor([float(right), float(len(mine))]), op=hvd.Sum)
    return {"accuracy": (counts[0] / counts[1]).item(), "ranks": hvd.size()}


def load(data: str) -> tuple[np.ndarray, np.ndarray]:
    if data != "digits":
        with np.load(data) as arrays:
            return arrays["x"], arrays["y"]
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8), digits.target.astype(np.uint8)


def session(options: argparse.Namespace) -> Any:
    """The session of Spark, whose tasks become the ranks."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("spark_mnist")
    if options.remote:
        return builder.remote(options.remote).getOrCreate()
    return builder.master(options.master).getOrCreate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    parser.add_argument("--remote", help="the address of a server of Spark Connect")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()

    import horovod.spark

    spark = session(options)
    images, labels = load(options.data)
    results = horovod.spark.run(train, args=(images, labels, options.epochs), num_proc=options.ranks)
    print(f"accuracy {results[0]['accuracy']:.3f} on {results[0]['ranks']} ranks")
    spark.stop()


if __name__ == "__main__":
    main()
