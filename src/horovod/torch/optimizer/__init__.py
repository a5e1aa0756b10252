"""``DistributedOptimizer``: its arguments, its buckets of parameters, and the reduction of gradients (Adasum: of steps).
``LocalOptimizer``: gradients inside of a host, and parameters across hosts."""

from horovod.torch.optimizer.adasum import AdasumOptimizer as _DistributedAdasumOptimizer
from horovod.torch.optimizer.distributed import DistributedOptimizer
from horovod.torch.optimizer.gradient_optimizer import GradientOptimizer as _DistributedOptimizer
from horovod.torch.optimizer.local import LocalOptimizer

__all__ = ["DistributedOptimizer", "LocalOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
