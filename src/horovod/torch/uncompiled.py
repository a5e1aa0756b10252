"""Keeps PyTorch's compiler out of what a thread does that carries out a collective it waits for.

Within a compiled function the compiler looks at every Python function that runs on the thread, also after a break of the graph.
The engine's code is nothing to be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from horovod.core.submission.handle import Driver, Handle, drive_plainly

_apart: Callable[[Driver, Handle], None] | None = None


def drive(driver: Driver, handle: Handle) -> None:
    """``driver.drive(handle)``, and nothing of it is compiled."""
    global _apart
    if not torch.compiler.is_compiling() and not _watched():
        drive_plainly(driver, handle)
        return
    if _apart is None:
        disable: Any = torch.compiler.disable
        _apart = disable(drive_plainly)
    _apart(driver, handle)


def _watched() -> bool:
    """Whether the compiler looks at what this thread runs; taken for granted where an older PyTorch does not tell."""
    if "torch._dynamo" not in sys.modules:
        return False
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() is not None
