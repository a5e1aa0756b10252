"""Excludes the engine from PyTorch's compiler when a waiting thread executes a collective itself.

Inside a compiled function the compiler traces every Python function that runs on the thread, also after a graph break. The code
of the engine must not be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from horovod.core.requests.handle import Driver, Handle, drive_plainly

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
"""Whether the compiler traces the calling function. PyTorch before 2.3 has it under a private name."""

_uncompiled: Callable[[Driver, Handle], None] | None = None


def drive(driver: Driver, handle: Handle) -> None:
    """Call ``driver.drive(handle)`` without compiling it."""
    global _uncompiled
    if not is_compiling() and not _is_traced():
        drive_plainly(driver, handle)
        return
    if _uncompiled is None:
        disable: Any = torch.compiler.disable
        _uncompiled = disable(drive_plainly)
    _uncompiled(driver, handle)


def _is_traced() -> bool:
    """Whether the compiler traces this thread. True if PyTorch is too old to tell."""
    if "torch._dynamo" not in sys.modules:
        return False
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() is not None
