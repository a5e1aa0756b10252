"""Gives PyTorch the name ``horovod`` of the back end, and replaces another back end by it if the user asks for that.

PyTorch calls :func:`register` through an entry point: 2.15 when a script first asks for the back end
(``torch.distributed.backends``), all versions at the end of ``import torch`` (``torch.backends``). So this module imports
little, and nothing of ``horovod.torch`` before a group is made: an error here would make ``import torch`` fail.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from horovod.core.config import TORCH_BACKEND

NAME = "horovod"
_REPLACED = "gloo"


def register() -> None:
    """Register the back end, if this PyTorch has ``torch.distributed``; once. The entry points call it."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    if os.environ.get(TORCH_BACKEND, "").strip().lower() == NAME:
        _stand_in()


def _make(options: Any, _: Any = None) -> Any:
    from horovod.torch.distributed.making import make

    return make(options)


def _stand_in() -> None:
    """Have ``init_process_group("gloo")`` make the default group with this back end."""
    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    original = module.init_process_group

    def init_process_group(backend: Any = None, *arguments: Any, **options: Any) -> Any:
        if backend is not None and str(backend).lower() in (_REPLACED, f"cpu:{_REPLACED}"):
            _say_so()
            backend = NAME
        return original(backend, *arguments, **options)

    init_process_group.__doc__, init_process_group.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    module.init_process_group = init_process_group
    package: Any = dist
    package.init_process_group = init_process_group


def _say_so() -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f'horovod: init_process_group("{_REPLACED}") uses the back end "{NAME}" ({TORCH_BACKEND}={NAME})',
            file=sys.stderr,
            flush=True,
        )
