"""Compares one optimizer between the ranks while they train: hyper-parameters in each step, parameters at the second, and
samples of both gradients and parameters in one of eight.

The comparison of a step runs beside the reduction of its gradients, and the result is read in the next step. If there is a
difference, that step gathers the ranks' values, and the step after it reports them. So no rank waits, which operations of
TensorFlow's graphs must not do. Parameters are compared at the second step, because scripts may broadcast them after the first,
when all of them exist; a step has been made with them, so what processors round differently is no difference. With
``HOROVOD_DEBUG``, the guard also compares all bytes of parameters at intervals, the gradients of the first steps, and the order
of the data.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from horovod._bindings.optimizer_name import OptimizerName
from horovod.comm.datatypes import Array
from horovod.comparison import alike
from horovod.comparison.alike import Alike, Value
from horovod.comparison.comparison import Comparison
from horovod.comparison.debugging import ModelDebugger, debugger, order
from horovod.comparison.looks import GRADIENTS, Seen, looks_at
from horovod.comparison.precision import Elements, precision_of
from horovod.comparison.rotation import LookedAt, Turn, parts_of, turns
from horovod.comparison.samples import Samples, SentLooks, StepLooks
from horovod.comparison.training_mistakes import FIRST_STEPS, digest_of
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.lifecycle.steps_made import StepCount

ELEMENTS = 4
"""How many elements of a parameter are compared: the first ones."""
_PARAMETERS = 64
"""How many parameters are compared, of the whole model."""

_BEGINNING = 4
"""The first step that looks at parameters: before it, the ranks compare those that they begin with."""

_FIRST = 2
"""The last step that looks at gradients in any case: if they differ, so do the parameters that the ranks begin with."""

T = TypeVar("T")
Held = Callable[[], Mapping[str, Value]]
"""Returns this rank's values by label. Labels are the same on all ranks."""
Tell = Callable[[Mapping[int, bytes] | None], None]
"""Takes what each rank holds, by global rank, or None if all are equal."""


class _Running(NamedTuple):
    """A comparison, and what its result is for.

    Attributes:
        tell: called with the result, the same on all ranks.
        what: the property that must agree, for the error. None: a difference is no error.
        sent: the looks that went along.
    """

    comparison: Comparison
    tell: Tell
    what: Alike | None
    sent: SentLooks = SentLooks()


class Guard:
    """The comparisons of one optimizer. All ranks make the guards of similar optimizers in the same order.

    Args:
        process_set: the ranks that train together.
        line: the line of the script that made the optimizer.
        owner: the optimizer and that line, as text.
    """

    def __init__(self, process_set: ProcessSet, line: str = "", owner: str = "") -> None:
        self._process_set, self._line = process_set, line
        self._owner = owner or (alike.made_at(line) if line else "")
        self._names_given = OptimizerName()
        self._name = ""  # in this generation
        self._compared: list[_Running] = []
        self._differing: list[_Running] = []
        self._names: Mapping[str, str] = {}
        self._steps = 0
        self._lock = threading.Lock()  # protects the change to another generation
        self._generation = -1
        self._debugger: ModelDebugger | None = None
        self._count = StepCount()
        self._samples: Samples | None = None
        self._apart: list[Comparison] = []  # whose looks differ
        self._applied: list[Turn] = []  # gradients of the step before
        self._looked = (0, 0)  # the last step that has looked at them, and how often it did
        self._joins = 0
        self._found: set[Alike] = set()  # the same on all ranks, as they get the same answers

    def choose_name(self, kind: object) -> str:
        """Choose the name of the comparisons, once in each generation. Called where a graph is built, in the order of the
        script, because the operations of a graph run in any order.

        Args:
            kind: distinguishes the optimizer from most others; the same on all ranks.
        """
        self._enter_generation()
        self._name = self._name or self._names_given.of(("guard", kind))
        return self._name

    @property
    def debugs(self) -> bool:
        """Whether :meth:`see` wants to see gradients."""
        return running().config.debug and len(self._process_set.ranks or ()) > 1

    def see(self, name: str, values: Array) -> None:
        """Look at a gradient of this rank before it is reduced, with ``HOROVOD_DEBUG``. Called once per step for each gradient,
        on any thread.

        Args:
            name: the name of the gradient.
            values: all elements of the gradient.
        """
        self._enter_generation()
        if self._debugger is not None:
            self._debugger.see(name, values)

    def step(
        self,
        kind: object,
        hyperparameters: Held,
        parameters: Held,
        names: Mapping[str, str],
        contents: Held = dict,
        every: LookedAt | None = None,
    ) -> None:
        """Compare, at the beginning of a step's reduction. Every member of the process set must call it.

        Args:
            kind: as for :meth:`choose_name`.
            hyperparameters: returns this rank's hyper-parameters.
            parameters: returns samples of this rank's parameters, see :func:`beginnings`.
            names: the names in errors for the labels of ``parameters`` and ``contents``.
            contents: returns digests of all bytes of all parameters, for ``HOROVOD_DEBUG``.
            every: the parameters whose gradients are reduced, of which some are looked at in each step.

        Raises:
            MismatchError: ranks differed, and ``HOROVOD_CHECK=error``. All of them raise it.
        """
        self._enter_generation()
        compared = alike.is_compared()
        if not compared and self._debugger is None:
            return
        self._names = {**self._names, **names}
        gathered, begun, apart = self._differing, self._compared, self._apart
        self._differing, self._compared, self._apart = [], [], []
        # Before anything is begun: a rank that raises leaves, and then no other rank can begin it.
        for comparison in apart:
            if self._samples is not None:
                self._samples.judge(comparison.held())
        for each in gathered:
            each.tell(each.comparison.held())
        for each in begun:
            if each.comparison.differs():
                if each.what is not None:
                    self._found.add(each.what)
                self._differing.append(each)
                each.comparison.gather()
                continue
            if each.comparison.differs_beside:
                self._apart.append(each.comparison)
                each.comparison.gather(each.sent.encode())
            each.tell(None)
        self._steps += 1
        self.choose_name(kind)
        if compared:
            if every is not None:
                self._look(every)
            self._begin(Alike.HYPERPARAMETERS, hyperparameters, always=True, every=every)
            if self._steps == 2:
                self._begin(Alike.PARAMETERS, parameters)
            if self._steps == 1:
                self._count = running().steps.of(self._name, self._process_set.ranks or (), self._line)
            self._count.made += 1
        if self._debugger is not None:
            self._debug(self._debugger, contents)

    def _enter_generation(self) -> None:
        generation, joins = running().generation, running().joins
        if generation == self._generation and joins == self._joins:
            return
        with self._lock:
            if generation == self._generation and joins != self._joins:
                # Before a join ends, ranks may have made different numbers of steps.
                self._joins, self._steps = joins, 0
                self._compared, self._differing, self._apart = [], [], []
                self._applied, self._looked = [], (0, 0)
                self._found.clear()
            if generation != self._generation:
                self._steps, self._joins = 0, joins
                self._compared, self._differing, self._apart = [], [], []
                self._applied, self._looked = [], (0, 0)
                number = self._process_set.process_set_id
                self._samples = Samples(number) if number is not None else None
                self._found.clear()  # a process that has just arrived has found nothing
                self._debugger = debugger(self._process_set, self._owner)
                self._name = ""
                self._generation = generation

    def _debug(self, debugger: ModelDebugger, contents: Held) -> None:
        """Make the comparisons of ``HOROVOD_DEBUG`` for the step before."""
        before = self._steps - 1
        if 1 <= before <= FIRST_STEPS:
            own = debugger.gradients(before)
            self._compare(f"gradients.{before}", own, functools.partial(debugger.take_gradients, own))
        if before == 1:
            self._begin(Alike.ORDER, lambda: order.held, always=True)
        # The first comparison of parameters is the usual one, of a few elements, because scripts may not have broadcast them
        # before.
        due = 1 < before <= FIRST_STEPS or (before > 1 and before % running().config.debug_steps == 0)
        if due and Alike.PARAMETERS not in self._found:
            self._begin(Alike.DRIFT, contents)

    def _begin(self, what: Alike, held: Held, always: bool = False, every: LookedAt | None = None) -> None:
        found = {} if what in self._found else dict(held())
        if found or always:
            tell = functools.partial(self._judge, what)
            self._compare(what.name.lower(), alike.encode(found), tell, what, self._samples if every else None)

    def _compare(
        self, called: str, held: bytes, tell: Tell, what: Alike | None = None, samples: Samples | None = None
    ) -> None:
        number = self._process_set.process_set_id
        sent = samples.taken() if samples is not None and samples.offers else SentLooks()
        comparison = Comparison(f"{self._name}.{called}", held, number, self._line, beside=sent.digest)
        self._compared.append(_Running(comparison, tell, what, sent))

    def applied(self, gradients: LookedAt) -> None:
        """Look at gradients that are about to be applied, and that the script may have changed since they were reduced. The
        next step compares them. Called after :meth:`step` of the same step, at the same point on all ranks.

        Args:
            gradients: in the order of the parameters.
        """
        self._enter_generation()
        samples = self._samples
        if samples is None or not self._steps or not alike.is_compared():
            return
        step, times = self._looked
        self._looked = step, times = self._steps, times + 1 if step == self._steps else 0
        owner = samples.owner(self._name, self._owner)
        self._applied = [] if owner.reported else turns(gradients, owner, step, GRADIENTS, times, step <= _FIRST)

    def _look(self, every: LookedAt) -> None:
        """Look at some parameters, whose numbers go with the comparison of hyper-parameters, as do those of gradients of the
        step before."""
        applied, self._applied = self._applied, []
        samples, step = self._samples, self._steps - 1  # that it has made
        if samples is None:
            return
        owner = samples.owner(self._name, self._owner)
        if self._steps == _BEGINNING and Alike.PARAMETERS in self._found:
            owner.parameters_reported = True
        parts = parts_of(applied, False)
        if (
            self._steps >= _BEGINNING
            and Alike.HYPERPARAMETERS not in self._found
            and samples.parameters_are_comparable(owner)
        ):
            parts += parts_of(turns(every, owner, step), True)
        if parts:
            looks = looks_at(parts)
            seen = Seen(len(parts), looks.values.tobytes(), lambda: looks)
            samples.offer(StepLooks(owner, step, every.amount, lambda: seen))

    def _gradients_were_reported(self) -> bool:
        return self._samples is not None and self._samples.owner(self._name, self._owner).reported

    def _judge(self, what: Alike, rows: Mapping[int, bytes] | None) -> None:
        if rows is None or (what is Alike.PARAMETERS and self._gradients_were_reported()):
            return
        named = {
            rank: {self._names.get(label, label): text for label, text in alike.decode(row).items()}
            for rank, row in rows.items()
        }
        if not alike.tell(what, named, self._owner):
            self._found.discard(what)


def compared_parameters(parameters: Sequence[T]) -> list[T]:
    """The parameters that are compared, from all parts of the model."""
    return list(parameters[:: -(-len(parameters) // _PARAMETERS)]) if parameters else []


def labels(count: int) -> list[str]:
    """The labels of ``count`` parameters."""
    return [f"parameter {number}" for number in range(count)]


def numbers(values: Mapping[str, Any]) -> dict[str, str]:
    """The numbers, flags and missing values among hyper-parameters as text."""
    return {label: repr(value) for label, value in values.items() if value is None or isinstance(value, int | float)}


def beginnings(samples: Sequence[Any], kinds: Sequence[str] = ()) -> dict[str, Value]:
    """The first elements of parameters, by label. A step has been made with them.

    Args:
        kinds: the names of their types, as in NumPy, if these are not those of ``samples``.
    """
    found: dict[str, Value] = {}
    arrays = [np.asarray(each).reshape(-1)[:ELEMENTS] for each in samples]
    names = kinds or [each.dtype.name for each in arrays]
    for label, array, kind in zip(labels(len(arrays)), arrays, names, strict=True):
        known = precision_of(kind) is not None
        values = tuple(array.astype(np.float64).tolist()) if known else ()
        found[label] = Elements(kind, values, exact=False) if known else repr(array.tolist())
    return found


def names_of_all(names: Sequence[str]) -> dict[str, str]:
    """The parameters' names in errors, by the labels of :func:`contents`."""
    return dict(zip(_labels_of_all(len(names)), names, strict=True))


def contents(parameters: Sequence[Any]) -> dict[str, str]:
    """Digests of all bytes of parameters, by label."""
    return {
        label: digest_of(np.asarray(each))
        for label, each in zip(_labels_of_all(len(parameters)), parameters, strict=True)
    }


def _labels_of_all(count: int) -> list[str]:
    return [f"parameter {number} of {count}" for number in range(count)]
