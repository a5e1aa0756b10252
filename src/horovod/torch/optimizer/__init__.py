"""``DistributedOptimizer`` and what it is made of."""

from horovod.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
