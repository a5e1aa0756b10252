"""Excludes the engine from PyTorch's compiler when a waiting thread executes a collective itself.

Inside a compiled function the compiler traces every Python function that runs on the thread, also after a graph break. The code
of the engine must not be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from horovod.core.requests.handle import Driver, Handle

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
"""Whether the compiler traces the calling function. PyTorch before 2.3 has it under a private name."""

_uncompiled: Callable[[Driver, Handle], None] | None = None


def drive(driver: Driver, handle: Handle) -> None:
    """Call ``driver.drive(handle)`` without compiling it."""
    global _uncompiled
    if "torch._dynamo" not in sys.modules or not (is_compiling() or _is_traced()):
        driver.drive(handle)
        return
    if _uncompiled is None:
        disable: Any = torch.compiler.disable
        _uncompiled = disable(_drive)
    _uncompiled(driver, handle)


def _drive(driver: Driver, handle: Handle) -> None:
    driver.drive(handle)


def _is_traced() -> bool:
    """Whether the compiler, which is loaded, traces this thread. True if PyTorch is too old to tell."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() is not None
