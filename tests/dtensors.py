"""A DTensor on one process, for what must refuse it."""

from __future__ import annotations

import functools
import tempfile

import torch
from torch import distributed

try:
    from torch.distributed import tensor as dtensor  # since PyTorch 2.5

    dtensor.DTensor  # noqa: B018  the module was there before, without it
except (ImportError, AttributeError):
    from torch.distributed import _tensor as dtensor


@functools.cache
def spread_over_a_mesh() -> torch.Tensor:
    """A DTensor over a mesh of this process alone. The process group that makes it is ended again."""
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(f"{folder}/store", 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = dtensor.DeviceMesh("cpu", [0])
            return dtensor.distribute_tensor(torch.ones(4), mesh)
        finally:
            distributed.destroy_process_group()
