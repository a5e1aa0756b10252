"""A DTensor on one process, for what must refuse it."""

from __future__ import annotations

import functools
import tempfile

import torch
from torch import distributed

try:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor
except ImportError:  # PyTorch before 2.5
    from torch.distributed._tensor import DeviceMesh, distribute_tensor


@functools.cache
def spread_over_a_mesh() -> torch.Tensor:
    """A DTensor over a mesh of this process alone. The process group that makes it is ended again."""
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(f"{folder}/store", 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            return distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]))
        finally:
            distributed.destroy_process_group()
