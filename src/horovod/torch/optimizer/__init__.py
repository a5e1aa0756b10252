"""``DistributedOptimizer``: its arguments, its buckets of parameters, and the reduction of gradients or of steps."""

from horovod.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
