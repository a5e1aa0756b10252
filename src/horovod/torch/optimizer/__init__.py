"""``DistributedOptimizer``: its arguments, its buckets of parameters, and the reduction of gradients (Adasum: of steps)."""

from horovod.torch.optimizer.adasum import AdasumOptimizer as _DistributedAdasumOptimizer
from horovod.torch.optimizer.distributed import DistributedOptimizer
from horovod.torch.optimizer.gradient_optimizer import GradientOptimizer as _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
