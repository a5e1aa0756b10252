"""Registers the back end with PyTorch under the name ``horovod``, unless an entry point has done so."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "horovod"


def register() -> None:
    """Register the back end, if this PyTorch has ``torch.distributed``. Further calls do nothing."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, _: Any = None) -> Any:
    from horovod.torch.distributed.making import make  # a script that makes no group need not import it

    return make(options)
