"""``TorchState``: the model, optimizer, sampler and other objects that an elastic job keeps when its ranks change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from horovod._bindings.objects import broadcast_object
from horovod.elastic.newest_state import NOWHERE, CommitProgress
from horovod.elastic.state import ObjectState
from horovod.torch.elastic.handlers import (
    GradScalerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
)
from horovod.torch.elastic.local_optimizer import LocalOptimizerStateHandler
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.mpi_ops import rank
from horovod.torch.optimizer.local_reduction import LocalGradientOptimizer

__all__ = [
    "GradScalerStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

Registry = list[tuple[Any, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (LocalGradientOptimizer, LocalOptimizerStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SamplerStateHandler),
    (torch.optim.lr_scheduler.ReduceLROnPlateau, SamplerStateHandler),
    (getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), GradScalerStateHandler),  # since 2.3, and before
]


def get_handler_registry() -> Registry:
    """Pairs of a type and the handler class for its objects. The first pair whose type fits an object is used."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[Any, type[StateHandler]]]) -> None:
    """Replace the pairs of a type and a handler class. Existing states keep their handlers."""
    global _registry
    _registry = list(registry)


class TorchState(ObjectState):
    """The state of an elastic PyTorch job, with everything that changes during training as an attribute.

    Modules, optimizers, :class:`~horovod.torch.elastic.ElasticSampler`, learning-rate schedulers and gradient scalers are
    copied and synchronised by their contents; other attributes are plain objects, as in
    :class:`~horovod.elastic.state.ObjectState`. Every rank must make the state with the same attributes. Assigning to an
    attribute that is not plain replaces the object and saves it.

    ``commit()`` copies models and optimizers into memory that is kept from one commit to the next. In a new round all ranks
    take over the state of a rank that is furthest ahead, never that of a new process.

    With ``rollback="step"``, ``commit()`` copies no parameters and no optimizer state. It marks the end of a step, and must be
    called at the end of every step. After a failure the ranks go on from the last step that any of them completed.

    *Why the ranks agree then.* Let step k be the last one that a surviving rank committed.

    1. A rank that has committed k has completed all collectives of steps up to k, to which every rank contributed. So no
       rank is more than one commit behind, and no rank has completed step k + 1: some collective of that step failed.
    2. Parameters and optimizer state change in ``optimizer.step()`` alone, and there only after all gradients of the step are
       reduced. So if no ``step()`` has begun since the commit of k, they are those of the end of step k. This is checked: the
       starts of ``step()`` are counted, and PyTorch's count of changes to each parameter is compared.
    3. Everything else that changes within a step (buffers, hyper-parameters, schedulers, samplers, scalers and plain objects)
       is copied at the commit, and restored. Gradients are discarded. So on such a rank everything is of the end of step k.
    4. The ranks exchange the step whose end they are at. The rank with the highest step becomes the root, and all of it is
       broadcast from there: parameters, optimizer state, schedulers and samplers of all ranks are those of one rank at one
       moment.

    A rank that failed between ``optimizer.step()`` and the commit is at no step's end and cannot be the root. If all ranks that
    committed last are in this position (a collective between the two failed, such as an average of losses), all go back to the
    last ``save()``. A round begins with one, and the script may call it at any time. Every optimizer that changes the model
    must be in the state.

    Args:
        model: a module, or None.
        optimizer: an optimizer, distributed or not, or None.
        rollback: the state that survivors go back to after a failure: ``"commit"`` to the copy of the last commit, ``"step"``
            to the end of the last step, without copies.
        kwargs: more attributes: further models and optimizers, samplers, schedulers, and plain objects such as ``epoch=0``.

    Raises:
        ValueError: a wrong ``rollback``; an attribute would hide a method.
        NotImplementedError: ``rollback="step"`` with a custom handler that cannot mark a step.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, rollback: Literal["commit", "step"] = "commit", **kwargs: Any
    ) -> None:
        if rollback not in ("commit", "step"):
            raise ValueError(f'rollback={rollback!r}: pass "commit" or "step"')
        self._handlers: dict[str, StateHandler] = {}
        self._marks = rollback == "step"
        self._progress = CommitProgress()
        self._live = True
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
        super().__init__(broadcast_object, rank, **plain)
        self._marked_objects = dict(self._saved_state)
        for name, handler in self._handlers.items():
            if hasattr(type(self), name):
                raise ValueError(f"TorchState({name}=...): a state has a method of this name; choose another one")
            object.__setattr__(self, name, handler.value)
        self._order_writes()
        if self._marks:
            self._mark()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = vars(self).get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
            self._order_writes()
            if self._marks:
                handlers[name].mark()
        object.__setattr__(self, name, value)

    def commit(self) -> None:
        """Commit one or several completed steps. Every rank must call it, after the same step.

        It copies the state, or with ``rollback="step"`` marks the step instead. Then it checks for host updates.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; ``hvd.elastic.run`` catches it.
        """
        self._progress.step += 1
        if self._marks:
            self._mark()
        else:
            self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Copy everything. It communicates nothing.

        With ``rollback="step"`` call it between a commit and the next step, for example in each epoch.
        """
        for handler in self._handlers.values():
            handler.save()
        self._order_writes()
        super().save()
        self._progress.saved = self._progress.step

    def restore(self) -> None:
        """Go back to the last save; with ``rollback="step"`` to the last commit where that is possible, see the class."""
        self._live = self._marks and self._live and all(handler.at_mark() for handler in self._handlers.values())
        if self._live:
            for handler in self._handlers.values():
                handler.return_to_mark()
            self._put(self._marked_objects)
        else:
            self._restore_saved()

    def sync(self) -> None:
        """Give all ranks the state of the rank that is furthest ahead, and save it. Every rank must call it.

        Raises:
            HorovodInternalError: a rank was lost meanwhile.
        """
        progress = self._progress
        root = progress.gather((progress.step if self._live else NOWHERE) if self._marks else progress.saved)
        objects, step = self._marked_objects if self._marks else self._saved_state, progress.step
        if not root.live:
            # Its objects are those of the save since restore(), apart from what reset callbacks have set.
            objects, step = self._saved_state, progress.saved
        # Objects that a broadcast overwrites are of no step until it is complete. The root's own objects do not change.
        self._live = root == (rank(), True)
        for handler in self._handlers.values():
            handler.root_rank = root.rank
            handler.before_sync()
        for handler in self._handlers.values():
            handler.sync()
        objects, step = broadcast_object((objects, step), root.rank, "elastic.objects")
        self._put(objects)
        self._saved_state = self._marked_objects = objects
        self.save()
        progress.adopt(step)
        if self._marks:
            self._mark()

    def on_interrupt(self) -> None:
        """Keep the present state. All ranks call it when they stop at a check because hosts change."""
        if self._marks:
            self._mark()
        else:
            self.save()

    def reset(self) -> None:
        """Let the samplers divide the rest of the epoch among the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _restore_saved(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _mark(self) -> None:
        for handler in self._handlers.values():
            handler.mark()
        self._marked_objects = {name: getattr(self, name) for name in self._saved_state}
        self._live = True

    def _put(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def _order_writes(self) -> None:
        """Let what writes to parameters wait until they are copied: a step of these optimizers, or else all that follows."""
        optimizers = [each for each in self._handlers.values() if isinstance(each, OptimizerStateHandler)]
        parameters = [each.parameters for each in self._handlers.values() if isinstance(each, ModelStateHandler)]
        for optimizer in optimizers:
            optimizer.also_before_step = parameters
        if not optimizers:
            for snapshot in parameters:
                snapshot.before_write()


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
