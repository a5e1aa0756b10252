"""Keeps PyTorch's compiler out of the wait for a collective.

Within a compiled function the compiler looks at every Python function that runs on the thread, also after a break of the graph.
A thread that waits may carry out a small collective itself, and the engine's code is nothing to be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Promise(Protocol):
    """A handle of the core, or what several make up."""

    def wait(self) -> Any: ...


_apart: Callable[[Promise], None] | None = None


def wait(promise: Promise) -> None:
    """``promise.wait()``, and nothing of it is compiled."""
    global _apart
    if not torch.compiler.is_compiling() and not _watched():
        _plainly(promise)
        return
    if _apart is None:
        disable: Any = torch.compiler.disable
        _apart = disable(_plainly)
    _apart(promise)


def _plainly(promise: Promise) -> None:
    promise.wait()


def _watched() -> bool:
    """Whether the compiler looks at what this thread runs; taken for granted where an older PyTorch does not tell."""
    if "torch._dynamo" not in sys.modules:
        return False
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() is not None
