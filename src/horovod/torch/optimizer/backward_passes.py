"""Notifies optimizers when a backward pass ends.

A pass is one graph task of PyTorch's autograd engine: a call of ``backward()``. An optimizer enters the pass at its first hook.
The first optimizer to enter registers a callback of the engine for the end of the pass. A pass inside another, as in reentrant
checkpointing, is a separate graph task. It ends separately, and then the gradients that it has reached are reduced.

The engine keeps the callback alive as long as the pass runs. If the callback was freed and not called, backward has raised.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import get_ident

import torch

from horovod.observe.step_clock import FORWARD, clock
from horovod.torch.optimizer.reduction_round import Participant, reduce_together
from horovod.torch.uncompiled import uncompiled

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task that this thread works for; -1 if there is none. Every backward pass has a different number."""


class PassListener(ABC):
    """An optimizer's object that is notified of the ends of the passes that have reached its parameters."""

    @abstractmethod
    def pass_ended(self, task: int, is_last: bool) -> bool:
        """Called at the end of a pass that it has entered. Returns whether the optimizer's gradients are reduced now.

        Args:
            task: the graph task of the pass.
            is_last: whether it was the last to enter the pass, as it probably will be in the next pass.
        """


@uncompiled
class BackwardPass:
    """The callback at the end of one pass.

    Attributes:
        ended: whether the pass has ended without an exception.
        reached: the optimizers to notify, each with its part in the round that may follow.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self.ended = False
        self.reached: dict[PassListener, Participant] = {}
        self._thread = get_ident()

    @property
    def is_here(self) -> bool:
        """Whether this thread has begun the pass."""
        return self._thread == get_ident()

    def __call__(self) -> None:
        self.ended = True
        clock.enter(FORWARD)
        _open.pop(self._task, None)
        reached, self.reached = self.reached, {}
        ending = []
        left = len(reached)
        for listener, participant in reached.items():
            left -= 1
            if listener.pass_ended(self._task, is_last=not left):
                ending.append(participant)
        if ending:
            reduce_together(ending)


_open: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


def call_at_end(function: Callable[[], None]) -> bool:
    """Have a function called at the end of the pass that runs in this thread, unless backward raises.

    Returns:
        False if hooks are called outside of PyTorch's autograd engine, so that nothing reports the end of the pass.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:  # hooks are called from compiled code
        return False
    return True


def enter(listener: PassListener, participant: Participant, task: int) -> BackwardPass | None:
    """Have an optimizer notified of the end of the pass that runs in this thread.

    Args:
        listener: is notified.
        participant: the optimizer in the round that may follow.
        task: :data:`current_task` in this thread.

    Returns:
        The pass. None if hooks are called outside of PyTorch's autograd engine, so that nothing reports the end of the pass.
    """
    found = _open.get(task)
    if found is None:
        found = BackwardPass(task)
        if not call_at_end(found):
            return None
        _open[task] = found
    found.reached.setdefault(listener, participant)
    return found
