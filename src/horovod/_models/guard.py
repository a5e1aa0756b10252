"""Compares what the ranks of one optimizer hold while they train: hyper-parameters in each step, parameters at the second.

The comparison of a step travels beside its gradients, and the answer is looked at in the next step. If it is a difference, what
the ranks hold is gathered beside the gradients of that step, and told in the one after it. So no rank waits, which it must not
in the operations of TensorFlow's graphs. Parameters are compared at the second step, because scripts may broadcast them after
the first, when all of them exist.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import alike, consensus
from horovod.common.alike import Alike
from horovod.common.optimizer_name import OptimizerName
from horovod.core.config import CHECK
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.lifecycle.steps_made import StepCount
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import allgather, prepared_allreduce

ELEMENTS = 4
"""How many elements of a parameter are compared: the first ones."""
_PARAMETERS = 64
"""How many parameters are compared, of the whole model."""

T = TypeVar("T")
Held = Callable[[], Mapping[str, str]]
"""What this rank holds, by label, as text. Labels are the same on all ranks."""


class _Comparison:
    """One comparison under way: first of digests, then of what the ranks hold.

    Args:
        name: of the request. One comparison of a name is under way at a time.
    """

    def __init__(self, what: Alike, name: str, held: bytes, process_set: ProcessSet, line: str) -> None:
        self.what, self._name, self._held, self._set, self._line = what, name, held, process_set, line
        self._terms = consensus.terms(held)
        self._sums = np.empty_like(self._terms)
        described = [(name, DataType.INT64, self._terms.shape)]
        prepared = prepared_allreduce(name, described, ReduceOp.SUM, 1.0, 1.0, line)
        self._digests = prepared.submit(process_set.process_set_id, [self._terms], [self._sums])
        self._gathered: list[Array] = []

    def differs(self) -> bool:
        """Whether the ranks hold different things; the same on all of them. Called in the next step."""
        self._digests.wait()
        return not consensus.all_equal(self._terms, self._sums)

    def gather(self) -> None:
        """Begin to gather what they hold."""
        row = np.frombuffer(consensus.pack(running().identity.rank, self._held), np.uint8).copy()

        def allocate(_: int, rows: int) -> Array:
            self._gathered.append(np.empty(rows, np.uint8))
            return self._gathered[0]

        tensors = [Tensor(row, DataType.UINT8, row.shape)]
        self._rows = allgather("allgather", f"{self._name}.held", tensors, allocate, self._set.process_set_id)

    def held(self) -> dict[int, dict[str, str]]:
        """What each rank holds. Called in the step after :meth:`gather`."""
        self._rows.wait()
        rows = consensus.unpack(self._gathered[0].tobytes())
        return {rank: msgspec.msgpack.decode(row, type=dict[str, str]) for rank, row in rows.items()}


class Guard:
    """The comparisons of one optimizer. The ranks make the guards of optimizers that are alike in the same order.

    Args:
        process_set: the ranks that train together.
        line: the line of the script that made the optimizer.
    """

    def __init__(self, process_set: ProcessSet, line: str = "") -> None:
        self._process_set, self._line = process_set, line
        self._name = ""
        self._compared: list[_Comparison] = []
        self._differing: list[_Comparison] = []
        self._names: Mapping[str, str] = {}
        self._steps = 0
        self._generation = -1
        self._count = StepCount()
        self._found: set[Alike] = set()  # the same on all ranks, as they get the same answers

    def be_named(self, kind: object) -> None:
        """Choose the name of the comparisons, once. Called where a graph is built, in the order of the script: operations of
        a graph run in any order.

        Args:
            kind: distinguishes the optimizer from most others; the same on all ranks.
        """
        self._name = self._name or OptimizerName().of(("guard", kind))

    def step(self, kind: object, hyperparameters: Held, parameters: Held, names: Mapping[str, str]) -> None:
        """Compare, at the beginning of a step's reduction. Every member of the process set must call it.

        Args:
            kind: as of :meth:`be_named`.
            names: what errors call a label of ``parameters``.

        Raises:
            MismatchError: ranks differed, and ``HOROVOD_CHECK=error``. All of them raise it.
        """
        if running().generation != self._generation:
            self._generation, self._steps = running().generation, 0
            self._compared, self._differing = [], []
        if not alike.is_compared():
            return
        self._names = {**self._names, **names}
        gathered, self._differing = self._differing, [each for each in self._compared if each.differs()]
        self._compared = []
        for comparison in self._differing:
            self._found.add(comparison.what)
            comparison.gather()
        self._steps += 1
        self.be_named(kind)
        self._begin(Alike.HYPERPARAMETERS, self._name, hyperparameters)
        if self._steps == 2:
            self._begin(Alike.PARAMETERS, self._name, parameters)
        if self._steps == 1:
            self._count = running().steps.of(self._name, self._process_set.ranks or (), self._line)
        self._count.made += 1
        for comparison in gathered:
            self._tell(comparison)

    def _begin(self, what: Alike, name: str, held: Held) -> None:
        found = {} if what in self._found else dict(held())
        if found:
            content, called = msgspec.msgpack.encode(found), f"{name}.{what.name.lower()}"
            self._compared.append(_Comparison(what, called, content, self._process_set, self._line))

    def _tell(self, comparison: _Comparison) -> None:
        held = comparison.held()
        named = {
            rank: {self._names.get(label, label): text for label, text in each.items()} for rank, each in held.items()
        }
        text = alike.account(comparison.what, named, self._line)
        if running().config.check == alike.ERROR:
            raise MismatchError(text, ranks=held)
        if running().identity.rank == min(held):
            hint = f"({CHECK}={alike.ERROR} makes this an error, {CHECK}={alike.OFF} hides it.)"
            warnings.warn(f"{text} {hint}", stacklevel=3)


def some(parameters: Sequence[T]) -> list[T]:
    """The parameters that are compared, from all parts of the model."""
    return list(parameters[:: -(-len(parameters) // _PARAMETERS)]) if parameters else []


def labels(count: int) -> list[str]:
    """The labels of that many parameters."""
    return [f"parameter {number}" for number in range(count)]


def numbers(values: Mapping[str, Any]) -> dict[str, str]:
    """The numbers, flags and missing values among hyper-parameters as text."""
    return {label: repr(value) for label, value in values.items() if value is None or isinstance(value, int | float)}


def digests(samples: Sequence[Any]) -> dict[str, str]:
    """The first elements of parameters as text, by label."""
    found = {}
    for label, sample in zip(labels(len(samples)), samples, strict=True):
        elements = np.ascontiguousarray(np.asarray(sample).reshape(-1)[:ELEMENTS])
        digest = hashlib.blake2b(elements.tobytes(), digest_size=4).hexdigest()
        begin = f"{elements[0]:.6g}" if elements.size else "nothing"
        found[label] = f"begins with {begin} ({digest})"
    return found
