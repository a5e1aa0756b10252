"""How a ``TorchState`` saves, restores and synchronises each kind of object.

With ``rollback="step"`` a handler also marks the end of a step without copying values that only an optimizer changes, and knows
whether its object has changed since.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from horovod.torch.elastic.snapshot import Snapshot
from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.optimizer.wrapped import WrappedOptimizer


class StateHandler:
    """One object of a state. For another class of objects, derive from it and add the pair to the registry.

    Attributes:
        value: the object.
        root_rank: the rank whose object :meth:`sync` gives to all ranks; the state sets it before each call.
    """

    root_rank = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the present object. It communicates nothing."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last save. It communicates nothing."""
        raise NotImplementedError

    def before_sync(self) -> None:
        """Called before any object of the state is given to all ranks. Every rank must call it."""

    def sync(self) -> None:
        """Give all ranks the object of rank ``root_rank``. Every rank must call it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the object, and save the new one."""
        self.value = value
        self.save()

    def mark(self) -> None:
        """Mark the end of a step: save what is cheap to save. Only ``rollback="step"`` needs it. It communicates nothing."""
        raise NotImplementedError(
            f'{type(self).__name__} cannot mark the end of a step; write mark() and return_to_mark(), or use rollback="commit"'
        )

    def at_mark(self) -> bool:
        """Whether :meth:`return_to_mark` would restore the object as of the last :meth:`mark`. It communicates nothing."""
        return True

    def return_to_mark(self) -> None:
        """Restore the object as of the last :meth:`mark`. It communicates nothing."""
        raise NotImplementedError


class ModelStateHandler(StateHandler):
    """A module: its parameters and its buffers.

    Only parameters are left out of a mark: forward passes change buffers (running statistics), an optimizer's step changes
    parameters. PyTorch counts changes, so a parameter that was written to since is noticed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.parameters = Snapshot()
        self._rest = Snapshot()
        self._marked_rest = Snapshot()
        self._versions: list[int] = []
        self.save()

    def save(self) -> None:
        parameters, rest = self._split()
        self._rest.take(rest)
        self._rest.before_write()  # a forward pass may write to buffers
        self.parameters.take(parameters)

    def restore(self) -> None:
        self.parameters.before_write()
        kept = copy.copy(self._rest.value())
        kept.update(self.parameters.value())
        self._load(kept)

    def sync(self) -> None:
        self.parameters.before_write()
        state = self.value.state_dict()
        broadcast_parameters(
            {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}, self.root_rank
        )
        others = {name: each for name, each in state.items() if not isinstance(each, torch.Tensor)}
        if others:  # a module's get_extra_state()
            others = broadcast_object(others, self.root_rank, "elastic.extra_state")
            state.update(others)
            self._load(state)

    def mark(self) -> None:
        self._marked_rest.take(self._split()[1])
        self._marked_rest.before_write()
        self._versions = self._counts()

    def at_mark(self) -> bool:
        return self._versions == self._counts()

    def return_to_mark(self) -> None:
        kept = self.value.state_dict()
        kept.update(self._marked_rest.value())
        self._load(kept)
        self._versions = self._counts()  # loading counts as a change

    def _split(self) -> tuple[Any, Any]:
        """The module's state in two parts of its class: parameters, and everything else."""
        state = self.value.state_dict()
        names = {name for name, _ in self.value.named_parameters(remove_duplicate=False)}
        rest = copy.copy(state)
        for name in names & rest.keys():
            del rest[name]
        return {name: each for name, each in state.items() if name in names}, rest

    def _counts(self) -> list[int]:
        return [parameter._version for parameter in self.value.parameters()]

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)


class OptimizerStateHandler(StateHandler):
    """An optimizer: its state and its hyper-parameters. Gradients are discarded when it is restored.

    A mark leaves the state out: only a step changes it, and steps are counted where they begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved = Snapshot()
        self._marked_groups: list[dict[str, Any]] = []
        self._begun = 0
        self._begun_at_mark = 0
        self.also_before_step: list[Snapshot] = []
        """The copies that must complete before a step, besides the optimizer's own: those of the models' parameters."""
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self.save()

    def set_value(self, value: torch.optim.Optimizer) -> None:
        self._hook.remove()
        self._hook = value.register_step_pre_hook(self._before_step)
        super().set_value(value)

    def save(self) -> None:
        self._saved.take(self.value.state_dict())

    def restore(self) -> None:
        self._saved.before_write()
        self.value.load_state_dict(copy.deepcopy(self._saved.value()))  # which keeps what it is given
        self._drop_gradients()

    def sync(self) -> None:
        self._saved.before_write()
        broadcast_optimizer_state(self.value, self.root_rank)

    def mark(self) -> None:
        self._begun_at_mark = self._begun
        self._marked_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self.value.param_groups
        ]

    def at_mark(self) -> bool:
        return self._begun == self._begun_at_mark and len(self._marked_groups) == len(self.value.param_groups)

    def return_to_mark(self) -> None:
        for group, values in zip(self.value.param_groups, self._marked_groups, strict=True):
            group.update(copy.deepcopy(values))
        if isinstance(self.value, WrappedOptimizer):
            self.value._horovod.abandon()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _before_step(self, *_: Any) -> None:
        self._begun += 1
        for snapshot in (self._saved, *self.also_before_step):
            snapshot.before_write()


class SamplerStateHandler(StateHandler):
    """Anything small with ``state_dict()`` and ``load_state_dict()``: samplers, learning-rate schedulers, gradient scalers."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)
        self._saved: Any = None
        self._marked: Any = None
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root_rank, "elastic.sampler"))

    def mark(self) -> None:
        self._marked = copy.deepcopy(self.value.state_dict())

    def return_to_mark(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._marked))


class GradScalerStateHandler(SamplerStateHandler):
    """A gradient scaler. A failure may come between ``unscale_()`` and ``update()``; the next step begins with neither."""

    def restore(self) -> None:
        self._begin_step()
        super().restore()

    def return_to_mark(self) -> None:
        self._begin_step()
        super().return_to_mark()

    def _begin_step(self) -> None:
        """Make the scaler forget for which optimizers it has unscaled gradients, as an update does."""
        if self.value.is_enabled() and self.value._scale is not None:  # which it has once it has scaled something
            self.value.update(self.value.get_scale())
