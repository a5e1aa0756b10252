"""Reads from Keras's optimizers what :mod:`horovod.comparison.guard` compares: hyper-parameters and samples of variables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod._keras.settings import KerasSettings
from horovod.comm.datatypes import Array
from horovod.comparison import guard
from horovod.comparison.looks import part_of
from horovod.comparison.rotation import LookedAt, TensorPart


class OptimizerGuard:
    """Compares one optimizer between the ranks, on any version and backend of Keras.

    Args:
        optimizer: the optimizer. The guard does not keep it alive.
    """

    def __init__(self, optimizer: Any, settings: KerasSettings) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._guard = guard.Guard(settings.process_set, settings.line)
        self._constants: dict[str, str] | None = None

    def rate(self) -> Any:
        """The variable of the learning rate. None if there is none, for example with a schedule."""
        optimizer = self._optimizer()
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None:
            rate = getattr(optimizer, "_hyper", {}).get("learning_rate")  # Keras 2's legacy optimizers
        return rate if hasattr(rate, "assign") else None

    @property
    def see(self) -> Callable[[str, Array], None] | None:
        """:meth:`horovod.comparison.guard.Guard.see`; None if nothing needs gradients."""
        return self._guard.see if self._guard.debugs else None

    def choose_name(self, variables: Sequence[Any]) -> str:
        """As :meth:`horovod.comparison.guard.Guard.choose_name`."""
        return self._guard.choose_name(_kind(variables))

    def check(self, variables: Sequence[Any]) -> None:
        """Compare the ranks. For backends that call Python in each step. Raises as
        :meth:`horovod.comparison.guard.Guard.step`."""
        rate, chosen = self.rate(), guard.compared_parameters(variables)
        self.compare(
            variables,
            None if rate is None else lambda: _array(rate),
            lambda: [_sample(each) for each in chosen],
            lambda: [_array(each) for each in variables],
            LookedAt(len(variables), lambda number, place: _part_of(variables[number], place)),
        )

    def compare(
        self, variables: Sequence[Any], rate: Any, samples: Any, whole: Any, every: LookedAt | None = None
    ) -> None:
        """Compare the ranks, with values that the caller provides.

        Args:
            variables: the optimizer's variables that the ranks share.
            rate: a function that returns the learning rate; None if no variable has it.
            samples: a function that returns the first elements of ``compared_parameters(variables)``.
            whole: a function that returns the variables as arrays; an empty list if they are not available.
            every: as for :meth:`horovod.comparison.guard.Guard.step`. None: those of ``samples``.
        """
        chosen = guard.compared_parameters(variables)
        if every is None:
            own = samples()
            every = LookedAt(
                len(chosen),
                lambda number, place: TensorPart(_name(chosen[number]), _kind_of(chosen[number]), lambda: own[number]),
            )

        def hyperparameters() -> Mapping[str, str]:
            return {**({} if rate is None else {"learning_rate": f"{float(rate()):.9g}"}), **self._of_configuration()}

        names = {
            label: f"{label} ({_name(each)})" for label, each in zip(guard.labels(len(chosen)), chosen, strict=True)
        }
        if self._guard.debugs:
            names |= guard.names_of_all([_name(each) for each in variables])
        self._guard.step(
            _kind(variables),
            hyperparameters,
            lambda: guard.beginnings(samples(), [_kind_of(each) for each in chosen]),
            names,
            lambda: guard.contents(whole()),
            every,
        )

    def applied(self, gradients: Mapping[int, Any], variables: Sequence[Any]) -> None:
        """As :meth:`horovod.comparison.guard.Guard.applied`, for tensors of TensorFlow or PyTorch.

        Args:
            gradients: those to look at, by the position of their variable.
        """

        def part(number: int, place: int) -> TensorPart | None:
            gradient = gradients.get(number)
            return None if gradient is None else _part(gradient, _name(variables[number]), place)

        self._guard.applied(LookedAt(len(variables), part))

    def applied_first(self, gradients: Sequence[Array | None], variables: Sequence[Any]) -> None:
        """As :meth:`applied`, for copies of the first elements of the gradients of ``compared_parameters(variables)``."""
        chosen = guard.compared_parameters(variables)

        def part(number: int, place: int) -> TensorPart | None:
            values = gradients[number]
            own = chosen[number]
            return None if values is None else TensorPart(_name(own), _kind_of(own), lambda: values)

        self._guard.applied(LookedAt(len(chosen), part))

    def _of_configuration(self) -> dict[str, str]:
        if self._constants is None:
            optimizer = self._optimizer()
            parts: dict[str, Any] = {"": optimizer, "learning_rate.": getattr(optimizer, "_learning_rate", None)}
            for number, part in enumerate(getattr(optimizer, "optimizers", ())):  # of a MultiOptimizer
                parts[f"optimizer {number}: "] = part
            self._constants = {
                f"{prefix}{label}": text for prefix, part in parts.items() for label, text in _constants(part).items()
            }
        return self._constants


def _constants(part: Any) -> dict[str, str]:
    """The numbers of an optimizer or a schedule. It does not call get_config(): a user's class may lack it, and Keras warns."""
    found = {name: value for name, value in getattr(part, "__dict__", {}).items() if name not in _OF_THE_MACHINE}
    return guard.numbers({name: value for name, value in found.items() if not name.startswith("_")})


_OF_THE_MACHINE = {"jit_compile", "built"}


def _kind(variables: Sequence[Any]) -> object:
    return len(variables), tuple(str(each.shape) for each in guard.compared_parameters(variables))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", ""))


def _array(variable: Any) -> Any:
    """The value of a variable of TensorFlow or PyTorch, or of Keras on them."""
    value = variable.value if hasattr(variable, "path") else variable
    if hasattr(value, "detach"):
        return of_torch(value)
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def of_torch(tensor: Any) -> Array:
    """The values of a tensor of PyTorch, in host memory. bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.detach().cpu()
    return np.asarray((values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy())


def _kind_of(variable: Any) -> str:
    """The name of the type of a variable's elements."""
    return str(getattr(variable.dtype, "name", variable.dtype)).removeprefix("torch.")


def _part_of(variable: Any, place: int) -> TensorPart | None:
    return _part(variable.value if hasattr(variable, "path") else variable, _name(variable), place)


def _part(value: Any, name: str, place: int) -> TensorPart | None:
    """Some elements of a tensor or variable in host memory; None if it is elsewhere."""
    kind = _kind_of(value)
    begin, apart = part_of(math.prod(value.shape), place)
    if hasattr(value, "detach"):
        if not value.is_cpu:
            return None
        copied = of_torch(value.detach().reshape(-1)[begin::apart]).copy()
        return TensorPart(name, kind, lambda: copied)
    if "GPU" in value.device:
        return None
    import tensorflow as tf

    values = tf.reshape(value, [-1])[begin::apart]
    return TensorPart(name, kind, (tf.cast(values, tf.float32) if kind == "bfloat16" else values).numpy)


def _sample(variable: Any) -> Any:
    """The first elements of a variable of TensorFlow or PyTorch, or of Keras on them."""
    value = variable.value if hasattr(variable, "path") else variable
    if hasattr(value, "detach"):
        return value.detach().reshape(-1)[: guard.ELEMENTS].cpu().numpy()
    import tensorflow as tf

    return tf.reshape(value, [-1])[: guard.ELEMENTS].numpy()
