"""Horovod for Apache MXNet.

Every rank runs a script with these lines::

    import horovod.mxnet as hvd
    hvd.init()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
"""

from __future__ import annotations

from horovod._bindings.frameworks import missing as _missing

try:
    import mxnet as _mxnet  # noqa: F401  so that the reason is clear before anything else fails
except Exception as error:  # with a NumPy that is too new for it, MXNet fails with an AttributeError
    raise _missing(
        error, "horovod.mxnet", "MXNet 1.9.1", "mxnet", " and in a separate environment, since it needs NumPy 1.23"
    ) from error

from horovod._bindings.exported_names import *  # noqa: F403  mypy does not find these through the next such line
from horovod.common.util import check_extension, split_list
from horovod.mxnet import mpi_ops
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from horovod.mxnet.mpi_ops import *  # noqa: F403  this module exports all of them
from horovod.mxnet.ops.errors import HorovodInternalError
from horovod.mxnet.training.optimizer import DistributedOptimizer
from horovod.mxnet.training.trainer import DistributedTrainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "check_extension",
    "split_list",
]
__all__ += mpi_ops.__all__
