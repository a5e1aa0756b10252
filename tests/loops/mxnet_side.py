"""The side of MXNet's loops: data, networks and trainers of Gluon.

The tables import no framework, so that they can be collected quickly: loops take all of it from their side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import numpy as np

import horovod.mxnet as hvd
from loops.harness import Outcome, Side, outcome

ROWS = 4
"""Rows of each rank in a batch."""
WIDTH, CLASSES = 6, 3


class MXNetSide(Side):
    """What MXNet's loops are given."""

    mx = mx
    hvd = hvd

    @property
    def rows(self) -> int:
        """The rows of a batch on this side."""
        return ROWS if self.distributed else ROWS * self.size

    def network(self, seed: int = 1) -> Any:
        """Two layers with names and values that are the same on all ranks."""
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mx.gluon.nn.Dense(8, activation="tanh", in_units=WIDTH), mx.gluon.nn.Dense(CLASSES, in_units=8))
        net.initialize()
        self.set_weights(net, seed)
        return net

    def set_weights(self, net: Any, seed: int) -> None:
        """Give a network the values of a seed."""
        drawn = np.random.default_rng(seed)
        for _, parameter in sorted(net.collect_params().items()):
            parameter.set_data(mx.nd.array(drawn.normal(size=parameter.shape) / 2))

    def trainer(self, net: Any, optimizer: Any = "sgd", **parameters: Any) -> Any:
        """A trainer; on a rank the distributed one."""
        if self.distributed:
            return hvd.DistributedTrainer(net.collect_params(), optimizer, parameters)
        return mx.gluon.Trainer(net.collect_params(), optimizer, parameters, kvstore=None)

    def backward(self, net: Any, step: int) -> None:
        """The backward pass of one step. Gradients are sums over rows."""
        drawn, rows = np.random.default_rng(1000 * step + 1), ROWS * self.size
        x, y = drawn.normal(size=(rows, WIDTH)), drawn.integers(CLASSES, size=rows)
        with mx.autograd.record():
            loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.array(self.share(x))), mx.nd.array(self.share(y)))
        loss.backward()

    def reduce(self, trainer: Any) -> None:
        """Add up the gradients over the ranks."""
        if self.distributed:
            trainer.allreduce_grads()

    def gradients(self, net: Any) -> list[Any]:
        """The gradients of all parameters, in the order of their names."""
        return [parameter.list_grad()[0] for _, parameter in sorted(net.collect_params().items())]


def both_sides(train: Callable[[MXNetSide], Any]) -> tuple[Outcome | None, Outcome]:
    """Run a loop on this rank, and on rank 0 alone as well, before."""
    rank, size = hvd.rank(), hvd.size()

    def loop(side: MXNetSide) -> Iterator[Any]:
        net = train(side)
        return (parameter.data().asnumpy() for _, parameter in sorted(net.collect_params().items()))

    alone = outcome(loop, MXNetSide(0, size, False)) if rank == 0 else None
    return alone, outcome(loop, MXNetSide(rank, size, True), end=hvd.shutdown)
