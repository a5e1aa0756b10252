"""Notifies optimizers when a backward pass ends.

A pass is one graph task of PyTorch's autograd engine: a call of ``backward()``. An optimizer enters the pass at its first hook.
The first optimizer to enter registers a callback of the engine for the end of the pass. A pass inside another, as in reentrant
checkpointing, is a separate graph task. It ends separately, and then the gradients that it has reached are reduced.

The engine keeps the callback alive as long as the pass runs. If the callback was freed and not called, backward has raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident

import torch

from horovod.observe.step_clock import FORWARD, clock
from horovod.torch.optimizer.reduction_round import Participant, reduce_together

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task that this thread works for; -1 if there is none. Every backward pass has a different number."""


class BackwardPass:
    """The callback at the end of one pass.

    Attributes:
        ended: whether the pass has ended without an exception.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self.ended = False
        self._reached: list[Participant] = []
        self._thread = get_ident()

    @property
    def is_here(self) -> bool:
        """Whether this thread has begun the pass."""
        return self._thread == get_ident()

    def enter(self, participant: Participant) -> None:
        if participant not in self._reached:
            self._reached.append(participant)

    def __call__(self) -> None:
        self.ended = True
        clock.enter(FORWARD)
        _open.pop(self._task, None)
        reached, self._reached = self._reached, []
        for each in reached:
            each.ends_passes = each is reached[-1]
        ending = [each for each in reached if each.pass_ended(self._task)]
        if ending:
            reduce_together(ending)


_open: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


def enter(participant: Participant, task: int) -> BackwardPass | None:
    """Have a participant notified of the end of the pass that runs in this thread.

    Args:
        participant: the optimizer.
        task: :data:`current_task` in this thread.

    Returns:
        The pass. None if hooks are called outside of PyTorch's autograd engine, so that nothing reports the end of the pass.
    """
    found = _open.get(task)
    if found is None:
        found = BackwardPass(task)
        try:
            torch.autograd.Variable._execution_engine.queue_callback(found)
        except RuntimeError:  # hooks are called from compiled code
            return None
        _open[task] = found
    found.enter(participant)
    return found
