"""Gives PyTorch the name ``horovod`` of the back end."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "horovod"


def register() -> None:
    """Register the back end, if this PyTorch has ``torch.distributed``. An entry point of PyTorch's calls it, too."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, given: Any = None) -> Any:
    from horovod.torch.distributed.group import make  # it needs more of PyTorch than is there when this is imported

    return make(options, given)
