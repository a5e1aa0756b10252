"""Train a network on handwritten digits with MXNet's Gluon, on any number of processes.

    horovodrun -np 2 python examples/mxnet_mnist.py

The lines with numbers make it a distributed program. The data are the 1,797 digits of 8 x 8 pixels that come with
scikit-learn, so nothing is downloaded. ``--data PATH.npz`` reads other data: arrays ``x`` (images, height, width), from 0 to
255, and ``y`` (labels from 0). The last fifth of the samples is for testing.

Needs the extras ``mxnet`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import horovod.mxnet as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits", help="'digits' (default), or an .npz file with x and y")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each process in a step (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="for one process (default: 0.05)")
    options = parser.parse_args()

    hvd.init()  # 1
    mx.random.seed(hvd.rank())
    gpus = mx.context.num_gpus()
    device = mx.gpu(hvd.local_rank() % gpus) if gpus else mx.cpu()  # 2: each process has its own GPU, if any
    images, labels = load(options.data)
    training = len(images) * 4 // 5

    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, activation="relu"),
        gluon.nn.Conv2D(32, 3, activation="relu"),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(int(labels.max()) + 1),
    )
    net.initialize(mx.init.Xavier(), ctx=device)
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)  # 3: all start with the same parameters
    # 4: gradients are averaged over all processes, so the batch is larger and allows a higher learning rate
    settings = {"learning_rate": options.learning_rate * hvd.size(), "momentum": 0.9}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    steps = training // (options.batch_size * hvd.size())  # the same number on every process
    for epoch in range(1, options.epochs + 1):
        order = np.random.default_rng(epoch).permutation(training)[hvd.rank() :: hvd.size()]  # 5: each has its own part
        total = mx.nd.zeros((1,), ctx=device)
        for step in range(steps):
            chosen = order[step * options.batch_size :][: options.batch_size]
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[chosen], ctx=device)), mx.nd.array(labels[chosen], ctx=device))
            loss.backward()
            trainer.step(options.batch_size)
            total += loss.mean()
        loss = hvd.allreduce(total / steps).asscalar()  # 6: the average over all processes
        mine = slice(training + hvd.rank(), None, hvd.size())
        right = (net(mx.nd.array(images[mine], ctx=device)).argmax(axis=1).asnumpy() == labels[mine]).sum()
        right = hvd.allreduce(mx.nd.array([right]), op=hvd.Sum).asscalar()
        if hvd.rank() == 0:  # 7: only one process prints
            accuracy = right / (len(images) - training)
            print(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {accuracy:.2%}", flush=True)


def load(source: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 (n, 1, height, width), from 0 to 1, and their labels, int64 (n,)."""
    if source == "digits":
        digits = load_digits()
        images, labels, white = digits.images, digits.target, 16
    else:
        with np.load(source) as file:
            images, labels, white = file["x"], file["y"], 255
    return (images[:, None] / white).astype(np.float32), labels.astype(np.int64)


if __name__ == "__main__":
    main()
