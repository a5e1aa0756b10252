"""Horovod for PyTorch.

Every rank runs a script with these lines::

    import horovod.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from horovod._bindings.frameworks import missing as _missing

try:
    import torch  # so that the reason is clear before anything else fails
except Exception as error:
    raise _missing(error, "horovod.torch", "PyTorch 2.1 or newer", "torch") from error

from horovod._bindings.exported_names import *  # noqa: F403  mypy does not find these through the next such line
from horovod.common.util import check_extension
from horovod.local_training.outer_sgd import OuterSGD
from horovod.torch import elastic, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.distributed import register
from horovod.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import *  # noqa: F403  this module exports all of them
from horovod.torch.optimizer import DistributedOptimizer, LocalOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "BucketCompressor",
    "Compression",
    "DistributedOptimizer",
    "LocalOptimizer",
    "OuterSGD",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
    "elastic",
]
__all__ += mpi_ops.__all__

register()  # torch.distributed.init_process_group("horovod")


def _check_has_gpu() -> bool:
    """Whether PyTorch sees a GPU. Existing scripts ask under this name."""
    return torch.cuda.is_available()
