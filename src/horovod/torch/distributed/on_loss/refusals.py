"""What cannot go on after a loss, and is refused by name when the first such call is made."""

from __future__ import annotations

import sys
from types import FrameType

import torch

_TORCH = torch.__path__[0]
_CALLERS = {
    f"{_TORCH}/distributed/fsdp/": "FSDP, which a lost rank takes parts of the model from",
    f"{_TORCH}/distributed/tensor/": "DTensor and tensor parallelism, which a lost rank takes parts of the model from",
    f"{_TORCH}/distributed/pipelining/": "pipelining, which a lost rank takes parts of the model from",
    f"{_TORCH}/distributed/optim/zero_redundancy_optimizer.py": (
        "ZeroRedundancyOptimizer, which a lost rank takes parts of the optimizer's state from"
    ),
    f"{_TORCH}/distributed/algorithms/join.py": "join(), which counts the ranks itself",
    f"{_TORCH}/nn/modules/_functions.py": "SyncBatchNorm, whose forward and backward passes count the ranks themselves",
}
"""By beginning of a file's path, what calls a group from there."""


def text(what: str) -> str:
    """The text of the error that refuses ``what``."""
    return f"--on-loss continue does not support {what}. Start the job without it, or see docs/on-loss.md for what it supports."


def check_callers() -> None:
    """Refuse the call that is being made if it comes from code that cannot go on.

    Raises:
        NotImplementedError: it does; the text says what it is.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_TORCH):
            for beginning, what in _CALLERS.items():
                if path.startswith(beginning):
                    raise NotImplementedError(text(what))
        frame = frame.f_back


def check_module(module: object) -> None:
    """Refuse a module for DistributedDataParallel that cannot go on.

    Raises:
        NotImplementedError: it has layers that cannot.
    """
    if isinstance(module, torch.nn.Module) and any(
        isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules()
    ):
        raise NotImplementedError(text(_CALLERS[f"{_TORCH}/nn/modules/_functions.py"]))
