"""Judges training loops: each rank trains as one process does on the whole batch, or stops with a sentence that says why.

A loop is a function of one argument, its :class:`Side`. It is called twice: in one process with all rows of every batch and
plain optimizers, and on every rank with this rank's rows and distributed ones. It returns the trained values.

    @TABLE.loop()
    def clipped(side): ...

    @TABLE.loop(refused="was changed before its reduction")
    def changed_in_a_window(side): ...

    @TABLE.loop(told="The gradients of the ranks differ")
    def clipped_on_one_rank(side): ...

The frameworks' own sides derive from :class:`Side`. This module imports no framework.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from loops.waiting import WAITING

S = TypeVar("S", bound="Side")


class Side:
    """One process with everything, or one rank with its share.

    Attributes:
        distributed: whether this is a rank of a job.
        rank, size: of the job. Alone: 0 and the size of the job that is compared with.
    """

    def __init__(self, rank: int, size: int, distributed: bool) -> None:
        self.rank, self.size, self.distributed = rank, size, distributed

    def share(self, rows: Any) -> Any:
        """This side's rows of a batch whose rows are those of rank 0, then those of rank 1, and so on."""
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each] if self.distributed else rows

    def parts(self, rows: Any) -> list[Any]:
        """The rows of each rank that this side stands for: one part on a rank, one for each rank alone.

        For what each rank does by itself: alone, the mean over the parts is what the ranks' average is.
        """
        each = len(rows) // self.size
        ranks = [self.rank] if self.distributed else range(self.size)
        return [rows[rank * each : (rank + 1) * each] for rank in ranks]


@dataclass(frozen=True)
class Loop(Generic[S]):
    """A loop and what must come of it.

    Attributes:
        refused: a regular expression for the error that every rank raises. "": the loop is right.
        warns: a regular expression for a warning that some rank gives. "": no rank warns of what one process does not.
        told: a regular expression for what ranks that come apart are told: a warning that some rank gives, or, with
            HOROVOD_CHECK=error, an error that every rank raises. Values are not compared. "": ranks do not come apart.
        tolerance: the largest difference between values of the two sides.
        sizes: the numbers of ranks that the loop is for.
        part: whether it belongs to the part that every run of the tests has.
        known: why the loop is wrong at present. The test then fails when the loop becomes right.
        arguments: keywords for the function that makes the framework's side.
    """

    name: str
    train: Callable[[S], Iterable[Any]]
    refused: str = ""
    warns: str = ""
    told: str = ""
    tolerance: float = 1e-9
    sizes: tuple[int, ...] = (2, 3)
    part: bool = True
    known: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    def under(self, check: str) -> Loop[S]:
        """The loop as it must be with a value of HOROVOD_CHECK."""
        return replace(self, refused=self.told, told="") if self.told and check == "error" else self


class Table(Generic[S]):
    """Loops by name, in the order in which they were written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loops: dict[str, Loop[S]] = {}

    def loop(self, **expected: Any) -> Callable[[Callable[[S], Iterable[Any]]], Callable[[S], Iterable[Any]]]:
        """A decorator that adds a function. Keywords are those of :class:`Loop`."""

        def add(train: Callable[[S], Iterable[Any]]) -> Callable[[S], Iterable[Any]]:
            self.add(train.__name__, train, **expected)
            return train

        return add

    def add(self, name: str, train: Callable[[S], Iterable[Any]], **expected: Any) -> None:
        """Add a loop, for example one of a family that a function makes."""
        assert name not in self._loops, f"two loops are called {name}"
        self._loops[name] = Loop(name, train, **{"known": WAITING.get(name, ""), **expected})

    def __iter__(self) -> Iterator[Loop[S]]:
        return iter(self._loops.values())

    def __len__(self) -> int:
        return len(self._loops)

    def __getitem__(self, name: str) -> Loop[S]:
        return self._loops[name]


@dataclass(frozen=True)
class Outcome:
    """What came of a loop on one side.

    Attributes:
        values: all trained values in one array. None if the loop raised.
        error: the type and the text of what it raised; "".
        trace: the traceback of the error; "".
        warned: the texts of the warnings that it gave.
    """

    values: np.ndarray[Any, Any] | None
    error: str = ""
    trace: str = ""
    warned: tuple[str, ...] = ()


def outcome(loop: Callable[[S], Iterable[Any]], side: S, end: Callable[[], None] = lambda: None) -> Outcome:
    """Run a loop on one side.

    Args:
        end: called at once if the loop raises, so that other ranks do not wait for this one: ``hvd.shutdown``.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = [np.asarray(value, dtype=np.float64).ravel() for value in loop(side)]
        except Exception as error:
            with suppress(Exception):
                end()
            text = f"{type(error).__name__}: {error}"
            return Outcome(None, text, traceback.format_exc(), _texts(caught))
    return Outcome(np.concatenate(values) if values else np.empty(0), warned=_texts(caught))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(each.message) for each in caught))


_OTHERS_LEFT = r"^HorovodInternalError: .*\brank"
"""What a rank raises whose partner was refused: an error that names a rank."""


def objection(loop: Loop[Any], alone: Outcome, ranks: Sequence[Outcome]) -> str:
    """What is wrong about the outcomes of a loop; "" if they are as expected."""
    if alone.values is None:
        return f"the loop is broken in one process:\n{alone.trace}"
    found = _verdict(loop, alone.values, ranks)
    if found:
        return found
    new = {text for each in ranks for text in each.warned} - set(alone.warned)
    wanted = loop.warns or loop.told
    if not wanted:
        return f"warned without cause: {sorted(new)}" if new and not loop.refused else ""
    if not any(re.search(wanted, text, re.DOTALL) for text in new):
        return f"no warning matches {wanted!r}: {sorted(new)}"
    return ""


def _verdict(loop: Loop[Any], wanted: np.ndarray[Any, Any], ranks: Sequence[Outcome]) -> str:
    raised = [each for each in ranks if each.values is None]
    if loop.refused:
        if not raised:
            return f"was not refused; {_comparison(loop, wanted, ranks) or 'it was right'}"
        matching = [each for each in raised if re.search(loop.refused, each.error, re.DOTALL)]
        others = [
            each for each in raised if each not in matching and not re.search(_OTHERS_LEFT, each.error, re.DOTALL)
        ]
        if matching and not others and len(raised) == len(ranks):
            return ""
        texts = "\n".join(each.trace or "trained to the end" for each in ranks)
        return f"was not refused on every rank with a text that matches {loop.refused!r}:\n{texts}"
    if raised:
        return "was refused:\n" + "\n".join(each.trace or "trained to the end" for each in ranks)
    return "" if loop.told else _comparison(loop, wanted, ranks)


def _comparison(loop: Loop[Any], wanted: np.ndarray[Any, Any], ranks: Sequence[Outcome]) -> str:
    values = [each.values for each in ranks if each.values is not None]
    for rank, found in enumerate(values):
        if found.shape != wanted.shape:
            return f"rank {rank} has {found.shape} values, one process {wanted.shape}"
        if found.tobytes() != values[0].tobytes():
            return f"ranks 0 and {rank} differ by {np.abs(found - values[0]).max():.2g}"
        difference = np.abs(found - wanted).max(initial=0.0)
        if not difference <= loop.tolerance:  # so that NaN is wrong
            return f"silently wrong: {difference:.2g} from one process"
    return ""
