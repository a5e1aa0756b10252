"""The outer parameters of one rank: which changes it sends when, and what it makes of their averages.

After a fragment's last local step, each rank sends *outer minus local* for each of its parameters. The average over the ranks
is the gradient of an outer step. A binding says how its parameters are read, written and sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from horovod.comparison.alike import Value
from horovod.core.errors import HorovodInternalError
from horovod.local_training.fragments import divide
from horovod.local_training.local_schedule import LocalSchedule
from horovod.local_training.outer_comparison import OuterComparison

Wait = Callable[[], Sequence[Any]]
"""Waits for a reduction, and returns the averages. Called once. Raises HorovodInternalError."""


class OuterParameter:
    """The outer part of one parameter, equal on all ranks.

    Attributes:
        fragment: the number of its fragment.
        value: the parameter after its last outer step.
        velocity: of the outer optimizer.
    """

    __slots__ = ("fragment", "value", "velocity")

    def __init__(self, fragment: int, value: Any, velocity: Any) -> None:
        self.fragment, self.value, self.velocity = fragment, value, velocity


class SentFragment:
    """A fragment on its way.

    Args:
        names: of its parameters.
        wait: waits for the averages; None: they are given.

    Attributes:
        is_given: whether the averages were loaded, and not sent for in the running generation.
    """

    def __init__(self, names: Sequence[str], wait: Wait | None, averages: Sequence[Any] = ()) -> None:
        self.names = list(names)
        self.is_given = wait is None
        self._wait = wait
        self._averages = list(averages)

    def averages(self) -> list[Any]:
        """Wait for the averages, in the order of the names. Raises HorovodInternalError."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            self._averages = list(wait())
        return self._averages

    def drop(self) -> None:
        """Wait for the end of the reduction, whatever its result."""
        try:
            self.averages()
        except Exception:  # for example, the job has failed, and the script restores a state
            pass


class OuterRounds(ABC):
    """The outer parameters of one optimizer on one rank.

    Args:
        schedule: the arguments of the script.
        line: the line of the script that made the optimizer.

    Attributes:
        steps: how many local steps were made.
    """

    def __init__(self, schedule: LocalSchedule, line: str) -> None:
        self.schedule = schedule
        self.steps = 0
        self._parameters: dict[str, OuterParameter] = {}
        self._arriving: dict[int, SentFragment] = {}
        self._comparison = OuterComparison(line)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the optimizer in requests, the same on all ranks."""

    @abstractmethod
    def local(self, names: Sequence[str]) -> list[Any]:
        """The present parameters, in the precision of the outer ones. They may share memory with the parameters."""

    @abstractmethod
    def continue_with(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Overwrite parameters. It keeps no reference to ``values``."""

    @abstractmethod
    def copied(self, value: Any) -> Any:
        """A copy of an array, on the device of the parameters."""

    @abstractmethod
    def start(self, label: str, names: Sequence[str], changes: Sequence[Any]) -> Wait:
        """Start to average the ranks' changes. ``changes`` may be overwritten."""

    @abstractmethod
    def elements(self, value: Any) -> Value:
        """Some elements of an outer parameter, for the comparison of ranks."""

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Called before each local step, with the number of elements of each parameter that is trained.

        Parameters that are new begin with their present values, which are equal on all ranks.
        """
        new = {name: size for name, size in sizes.items() if name not in self._parameters}
        if not new:
            return
        elements = Counter[int]()
        for name, known in self._parameters.items():
            elements[known.fragment] += sizes.get(name, 0)
        for name, fragment in divide(new, self.schedule.fragments, elements).items():
            (value,) = map(self.copied, self.local([name]))
            self._parameters[name] = OuterParameter(fragment, value, value * 0)

    def after_step(self) -> None:
        """Count a local step, send the fragments whose turn it is, and apply those that arrive. Every rank must call it.

        Raises:
            HorovodInternalError: a reduction has failed.
            MismatchError: the hosts' outer parameters differ, and ``HOROVOD_CHECK=error``.
        """
        self.steps += 1
        for fragment in self.schedule.sent(self.steps):
            self._send(fragment, self._names(fragment))
        for fragment in self.schedule.arriving(self.steps):
            if fragment in self._arriving:
                self._apply(self._arriving.pop(fragment), self.schedule.mixing)

    def finish(self) -> None:
        """Give all ranks the same parameters: the average of those that they have. Every rank must call it.

        Fragments on their way are applied first. The outer optimizer keeps its momentum, and makes no step.

        Raises:
            as :meth:`after_step`.
        """
        for fragment in sorted(self._arriving):
            self._apply(self._arriving.pop(fragment), self.schedule.mixing)
        names = list(self._parameters)
        if names:
            wait = self.start(f"{self.name}.outer.all", names, self._changes(names))
            for name, average in zip(names, wait(), strict=True):
                self._parameters[name].value -= average
            self.take_outer()
        self._comparison.finish()

    def take_outer(self) -> None:
        """Continue with the outer parameters."""
        names = list(self._parameters)
        self.continue_with(names, [self._parameters[name].value for name in names])

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint needs to continue; None before the first step. It waits for fragments on their way, which all
        ranks have sent. Nothing is copied.
        """
        if not self._parameters:
            return None
        return {
            "steps": self.steps,
            "timing": list(self.schedule.timing),
            "parameters": {
                name: {"fragment": each.fragment, "outer": each.value, "velocity": each.velocity}
                for name, each in self._parameters.items()
            },
            "arriving": {
                fragment: dict(zip(each.names, each.averages(), strict=True))
                for fragment, each in self._arriving.items()
            },
        }

    def load(self, saved: Mapping[str, Any] | None, sizes: Mapping[str, int]) -> None:
        """Replace everything by a saved state. None: start again with the parameters of the next step.

        With other numbers of steps, fragments or delay than those that the state was saved with, fragments are cut again, and
        those that were on their way miss their round.

        Args:
            sizes: the number of elements of each parameter.

        Raises:
            ValueError: the state is of other parameters. Nothing has changed then.
        """
        if saved is not None:
            for name, each in saved["parameters"].items():
                if name not in sizes or sizes[name] != _elements(each["outer"]):
                    raise ValueError(
                        f"the saved outer state has a parameter {name!r} of {_elements(each['outer'])} elements, and this "
                        f"optimizer has {'none of this name' if name not in sizes else f'one of {sizes[name]}'}. Load it into "
                        "an optimizer of the same model, with the same named_parameters"
                    )
        self.drop()
        self.steps, self._parameters = 0, {}
        if saved is None:
            return
        self.steps = saved["steps"]
        same = tuple(saved["timing"]) == self.schedule.timing
        found = saved["parameters"]
        fragments = (
            {name: each["fragment"] for name, each in found.items()}
            if same
            else divide({name: sizes[name] for name in found}, self.schedule.fragments)
        )
        for name, fragment in fragments.items():  # in this order parameters are sent, on ranks that load and on others
            each = found[name]
            self._parameters[name] = OuterParameter(fragment, self.copied(each["outer"]), self.copied(each["velocity"]))
        if same:
            self._arriving = {
                int(fragment): SentFragment(list(each), None, [self.copied(average) for average in each.values()])
                for fragment, each in saved["arriving"].items()
            }

    def new_generation(self) -> None:
        """Called when a new generation begins. Fragments that were sent in an earlier one miss their round."""
        self._arriving = {fragment: each for fragment, each in self._arriving.items() if each.is_given}

    def drop(self) -> None:
        """Wait for the ends of the reductions of fragments on their way, and forget them."""
        for each in self._arriving.values():
            each.drop()
        self._arriving = {}

    def _names(self, fragment: int) -> list[str]:
        return [name for name, each in self._parameters.items() if each.fragment == fragment]

    def _changes(self, names: Iterable[str]) -> list[Any]:
        names = list(names)
        return [self._parameters[name].value - local for name, local in zip(names, self.local(names), strict=True)]

    def _send(self, fragment: int, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            wait = self.start(f"{self.name}.outer.{fragment}", names, self._changes(names))
        except (
            HorovodInternalError
        ) as error:  # perhaps another rank has ended after its last step: then no rank needs it
            wait = partial(_fail, error)
        self._arriving[fragment] = SentFragment(names, wait)

    def _apply(self, arrival: SentFragment, mixing: float) -> None:
        names = arrival.names
        for name, average in zip(names, arrival.averages(), strict=True):
            each = self._parameters[name]
            self.schedule.outer.step(each.value, each.velocity, average)
        values = [self._parameters[name].value for name in names]
        if mixing:
            mixed = [
                value * (1 - mixing) + local * mixing for value, local in zip(values, self.local(names), strict=True)
            ]
            self.continue_with(names, mixed)
        else:
            self.continue_with(names, values)
        self._comparison.finish()
        if self._comparison.wanted:
            held: dict[str, Value] = {name: self.elements(self._parameters[name].value) for name in names}
            self._comparison.begin(self.name, {"local steps": str(self.steps), **held})


def _fail(error: HorovodInternalError) -> NoReturn:
    raise error


def _elements(array: Any) -> int:
    count = 1
    for length in array.shape:
        count *= int(length)
    return count
