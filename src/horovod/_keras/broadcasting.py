"""The callback that broadcasts variables when training begins, without its base class; see :mod:`horovod._keras.callbacks`."""

from __future__ import annotations

from typing import Any

from horovod._keras.first_step import at_first_step, forget, trains_alone, trains_on_tensorflow
from horovod._keras.values import all_say, broadcast_variables, highest
from horovod.common.basics import is_initialized, rank, size
from horovod.core.lifecycle.context import running
from horovod.observe.call_site import warn


class BroadcastGlobalVariables:
    """Begin training with the same variables on all ranks: those of rank ``root_rank``.

    The callback broadcasts the weights of the model and all variables of its optimizer, before the first batch, or on
    TensorFlow as soon as they are made in its training step. Variables that only the step itself makes are broadcast at the end
    of the first batch, with a warning. The states of random generators and metrics are not broadcast.

    It does so once in each generation, as a rank that has just arrived would otherwise broadcast alone.

    Args:
        root_rank: the rank whose values are used.
        device: accepted for compatibility.
        local_variables: variables that are not broadcast.

    Attributes:
        broadcast_done: whether the variables have been broadcast in this generation.

    Raises:
        ValueError: ``local_variables`` contains something that is not a variable.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._asked = False
        self._in_step = False
        self._generation = -1
        self._weights: list[Any] = []
        self._local: list[Any] = []
        for variable in local_variables or []:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast ``var``."""
        if not (hasattr(var, "assign") and hasattr(var, "shape")):
            raise ValueError(f"local_variables must consist of variables, not {type(var).__name__}")
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        """Keras calls it before :meth:`on_batch_begin`."""
        base: Any = super()
        base.set_model(model)
        if is_initialized() and self._generation != running().generation:
            self._generation, self.broadcast_done, self._asked = running().generation, False, False
            self._weights = []
        if not self.broadcast_done and "train_step" not in vars(model) and trains_on_tensorflow(model):
            self._in_step = getattr(model, "train_function", None) is None
            at_first_step(model, lambda: self._asked and self._in_step and not self.broadcast_done, self._in_first_step)

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done or self._asked:
            return
        self._asked = True
        model = self.model
        if size() > 1 and trains_alone(model):
            warn(_ALONE.format(name=type(model.optimizer).__name__))
        # A rank that loaded a checkpoint may have variables that other ranks do not have yet.
        if all_say(_made(model)):
            self._broadcast(model)
        else:  # a model that has trained before has the function of its step already
            self._in_step = all_say(self._in_step)

    def _in_first_step(self) -> None:
        model = self.model
        made, count = _made(model), float(len(model.weights))
        if all_say(made):
            self._broadcast(model)
        elif highest(count) == -highest(-count):
            self._weights = list(model.weights)
            self._send(self._weights)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        model = self.model
        forget(model)
        late = [each for each in model.trainable_weights if not any(each is sent for sent in self._weights)]
        self._broadcast(model)
        if late and rank() == self.root_rank and size() > 1:
            names = ", ".join(str(getattr(each, "path", each.name)) for each in late[:3])
            warn(_LATE.format(names=names, more=f" and {len(late) - 3} more" if len(late) > 3 else ""))

    def _broadcast(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        variables = list(model.weights)
        if optimizer is not None:
            own = optimizer.variables
            variables += own() if callable(own) else own
        self._send(variables)
        self.broadcast_done = True

    def _send(self, variables: list[Any]) -> None:
        chosen = [each for each in variables if not any(_same(each, local) for local in self._local)]
        broadcast_variables(chosen, self.root_rank)


_LATE = (
    "The variables {names}{more} were made in the first batch, so the ranks computed it with different values, and have equal "
    "ones only now. Build the model before fit(), with model.build(input_shape) or by calling it on a batch."
)
_ALONE = (
    "The optimizer of the model, {name}, is not distributed, so each rank trains alone. Wrap it with hvd.DistributedOptimizer "
    "before compile(). A model that was saved or copied has the original optimizer: load it with hvd.load_model."
)


def _made(model: Any) -> bool:
    """Whether the model and its optimizer have all their variables. Builds the optimizer if possible."""
    if not getattr(model, "built", False):
        return False
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return True
    if not _built(optimizer) and hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    return _built(optimizer)


def _built(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def _same(one: Any, two: Any) -> bool:
    """Whether two objects are the same variable. A Keras variable may hold one of TensorFlow."""
    return one is two or any(getattr(a, "_value", None) is b for a, b in ((one, two), (two, one)))
