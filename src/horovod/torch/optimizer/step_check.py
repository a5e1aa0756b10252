"""Checks values of an optimizer that must be the same on all ranks: the numbers in its parameter groups, and, at the first
step, a sample of its parameters.

A rank's record contains a digest of both (:class:`StepCheck`), so a comparison needs no extra message. The ranks compare the
values only if digests differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import msgspec
import torch

from horovod.comparison.alike import Alike, Value, compare, is_compared
from horovod.comparison.comparison import digest
from horovod.comparison.precision import Elements, precision_of
from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.buckets import ParameterState

GROUPS = 16
"""How many parameter groups of an optimizer each step compares. If there are more, the next step continues with others."""
_SAMPLE = 8
"""The number of elements of a parameter that are compared."""
_NUMBERS = (float, int, bool)
_encode = msgspec.msgpack.Encoder().encode


class StepCheck:
    """The comparison of one optimizer. After a difference in hyper-parameters or in parameters, it stops comparing these until
    the next generation."""

    def __init__(self) -> None:
        self._reported: set[Alike] = set()
        self._begun = False
        self._compares = False
        self._values: list[Any] = [None]  # of the groups, if the digest follows from which objects they are
        self._digest = 0

    def begin(self) -> None:
        """Begin a new generation: its first step compares parameters, and it forgets what it has reported, since a process that
        has just arrived has reported nothing."""
        self._begun = False
        self._reported.clear()
        self._compares = is_compared()

    def joined(self) -> None:
        """Note that all ranks have joined. Until then some may have reported what others have not, and now parameters
        differ."""
        self._begun = True
        self._reported.clear()

    @property
    def same_numbers(self) -> bool:
        """Whether no difference in hyper-parameters was reported, which makes parameters differ."""
        return Alike.HYPERPARAMETERS not in self._reported

    @property
    def same_beginning(self) -> bool:
        """Whether no difference in the first parameters was reported."""
        return Alike.PARAMETERS not in self._reported

    def digest(self, optimizer: torch.optim.Optimizer, slots: Iterable[ParameterState], steps: int) -> int:
        """The digest in this rank's record. 0: nothing is compared. Ranks with the same values have the same digest.

        Args:
            steps: the number of steps that the optimizer has made.
        """
        if not self._compares:
            return 0
        groups = optimizer.param_groups if Alike.HYPERPARAMETERS not in self._reported else []
        if len(groups) > GROUPS:
            first = steps * GROUPS % len(groups)
            groups = groups[first : first + GROUPS]
        values: list[Any] = []
        for group in groups:
            values += group.values()
        if self._begun and len(values) == len(self._values) and all(map(is_, values, self._values)):
            return self._digest
        held: list[Any] = []
        plain = True
        for group in groups:
            held += [value for value in group.values() if value.__class__ in _NUMBERS or value.__class__ is tuple]
            if isinstance(group.get("lr"), torch.Tensor):
                plain = False
                held += [text for label, text in _numbers(0, group) if label.startswith("lr")]
        if not self._begun and Alike.PARAMETERS not in self._reported:
            held += [repr(value) for slot in slots for value in _sample(slot)]
        try:
            encoded = _encode(held)
        except (TypeError, OverflowError):  # a tuple of the script's own objects, or a large integer
            plain = False
            encoded = repr(held).encode()
        self._digest = digest(encoded)
        self._values = values if plain and self._begun else [None]
        return self._digest

    def agreed(self) -> None:
        """Note that all ranks have the same digest."""
        self._begun = True

    def compare(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Iterable[ParameterState],
        name: str,
        process_set_id: int | None,
        line: str,
    ) -> None:
        """Find the difference, and report it, because digests differ. Every rank of the process set must call it.

        Raises:
            MismatchError: a value differs, and HOROVOD_CHECK=error.
        """
        if Alike.HYPERPARAMETERS not in self._reported:
            numbers = dict(
                pair for index, group in enumerate(optimizer.param_groups) for pair in _numbers(index, group)
            )
            if not compare(Alike.HYPERPARAMETERS, numbers, name, process_set_id, line):
                self._reported.add(Alike.HYPERPARAMETERS)
        if not self._begun and Alike.PARAMETERS not in self._reported:
            exact = not running().steps.begun
            samples = {slot.name: _elements(slot, exact) for slot in slots}
            if not compare(Alike.PARAMETERS, samples, name, process_set_id, line):
                self._reported.add(Alike.PARAMETERS)
        self._begun = True


def _numbers(index: int, group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers of a parameter group, with labels, including tensors of one element, which are read from their devices."""
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, _NUMBERS) or (
            isinstance(value, tuple) and all(isinstance(each, _NUMBERS) for each in value)
        ):
            yield f"{key} of group {index}", repr(value)


def _sample(slot: ParameterState) -> list[Any]:
    """Some elements of a parameter, evenly spread."""
    flat = slot.parameter.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
    return chosen.cpu().tolist()


def _elements(slot: ParameterState, exact: bool) -> Value:
    """Some elements of a parameter, to be compared."""
    kind, values = str(slot.parameter.dtype).removeprefix("torch."), _sample(slot)
    return repr(values) if precision_of(kind) is None else Elements(kind, tuple(values), exact)
