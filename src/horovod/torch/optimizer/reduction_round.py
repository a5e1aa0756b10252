"""A round: one reduction of gradients in which all ranks take part, at the end of a backward pass or in ``step()``.

    record      every rank sends which gradients of which optimizers have new contributions
    conclude    every rank learns which gradients any rank has touched
    send        every rank sends those gradients, except those that it has sent during backward
    wait        every rank waits for all these reductions

The ranks need not be in the same optimizer. One rank may be at the end of a pass that has reached only the parameters of a
GAN's generator, while the pass of another rank has reached no parameters, so that this rank is in ``step()`` already. Every
rank sends all gradients that any record names, and only then waits. So no two ranks wait for each other.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import count, repeat
from operator import attrgetter
from typing import NamedTuple

from horovod.comm.tuned import TunedSettings
from horovod.comparison.comparison import Comparison, request_of
from horovod.comparison.samples import Samples, SentLooks, samples_of
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.submission.prepared import Prepared
from horovod.observe.step_clock import REDUCTION, clock
from horovod.torch.optimizer.pass_record import Conclusion, PassRecord, TouchedGradients, conclude, decode, is_idle

_NAME = attrgetter("name")
RECORD = "DistributedOptimizer.pass"
"""The name of the records' comparison, in errors and stall reports."""


class Participant(ABC):
    """The interface of an optimizer that takes part in rounds.

    Attributes:
        name: the optimizer's name, the same on all ranks; "" before its first use.
        process_set: the ranks that reduce its gradients.
        line: the line of the script that made the optimizer.
    """

    name: str
    process_set: ProcessSet
    line: str

    @property
    @abstractmethod
    def is_named(self) -> bool:
        """Whether the optimizer has a name in the running generation."""

    @abstractmethod
    def prepare(self) -> None:
        """Take a name in the running generation."""

    @abstractmethod
    def touched(self, final: bool) -> TouchedGradients:
        """The optimizer's entry in this rank's record.

        Args:
            final: whether to include gradients that no backward pass has reached.
        """

    def is_elsewhere(self) -> bool:
        """Whether another thread runs a backward pass that has touched its gradients."""
        return False

    @abstractmethod
    def send_touched(self, conclusion: Conclusion) -> None:
        """Send all gradients that are to be reduced and are not sent yet."""

    @abstractmethod
    def finish(self, conclusion: Conclusion, members: int) -> None:
        """Wait for all gradients that were sent.

        Args:
            conclusion: the ranks' conclusion about this optimizer.
            members: the number of ranks that take part. The others have joined.

        Raises:
            HorovodInternalError: a reduction failed.
            AssertionError: the script has changed a gradient that was not reduced.
        """

    def tune(self, settings: TunedSettings) -> None:
        """Apply settings of autotuning, which are the same on all ranks. Called between two rounds."""
        del settings  # this optimizer has no such setting

    @abstractmethod
    def forget(self) -> None:
        """Abandon the present step, because a round has failed."""


_participants: weakref.WeakValueDictionary[int, Participant] = weakref.WeakValueDictionary()
"""The optimizers of this process, in the order in which they were made."""
_count = count()
_running: set[int | None] = set()
"""The process sets in which a thread of this process reduces at present."""
_THREADS = (
    "Two threads of this process run backward() or step() of distributed optimizers at the same time. All ranks must "
    "use the optimizers of a process set in the same order, so only one thread may use them."
)


def register_optimizer(participant: Participant) -> None:
    """Let rounds find an optimizer by its name, as long as it exists."""
    _participants[next(_count)] = participant


def participants() -> list[Participant]:
    """The optimizers of this process, the oldest first."""
    return list(_participants.values())


def reduce_together(ending: Iterable[Participant], final: bool = False) -> bool:
    """Reduce the gradients that any rank's optimizers have touched. Every rank of their process sets must call it.

    Args:
        ending: the optimizers whose gradients this rank has touched, or in whose ``step()`` it is.
        final: this rank is in ``step()`` or ``synchronize()``.

    Returns:
        Whether all ranks are in ``step()`` of different optimizers, and none has a gradient to reduce.

    Raises:
        HorovodInternalError: a reduction failed, or ranks differ in steps or parameters.
        AssertionError: the script has changed a gradient that was not reduced.
    """
    sets: dict[int | None, list[Participant]] = {}
    for each in ending:
        sets.setdefault(each.process_set.process_set_id, []).append(each)
    if not _running.isdisjoint(sets):
        raise AssertionError(_THREADS)
    before = clock.enter(REDUCTION)
    _running.update(sets)
    try:
        return _reduce_sets(sets, final)
    finally:
        _running.difference_update(sets)
        clock.enter(before)


def _reduce_sets(sets: Mapping[int | None, list[Participant]], final: bool) -> bool:
    involved: list[Participant] = []
    for members in sets.values():
        involved += members
    try:
        rounds = [*map(_Round, sets.values(), repeat(final))]
        for part in rounds:
            part.conclude()
            involved += part.concluded
        for part in rounds:
            for participant, conclusion in part.concluded.items():
                participant.send_touched(conclusion)
    except BaseException:
        for participant in involved:
            participant.forget()
        raise
    error: BaseException | None = None
    idle = False
    for part in rounds:
        error = part.finish() or error
        idle = idle or part.idle
    if error is not None:
        raise error
    return idle


class _RoundsOfSet(NamedTuple):
    """What the rounds of a process set have in common in one generation.

    Attributes:
        generation: the generation.
        request: of the comparison of records, with one line for all of them. A line that depends on the optimizer would make
            a new request each time, which would be announced in full.
        samples: the looks of the set's optimizers; None if nothing is compared.
    """

    generation: int
    request: Prepared
    samples: Samples | None


_rounds_of: dict[int | None, _RoundsOfSet] = {}
"""By process set, of its last generation."""


class _Round:
    """The part of a round that concerns one process set. The constructor sends this rank's record."""

    def __init__(self, ending: list[Participant], final: bool) -> None:
        self._process_set = ending[0].process_set
        touched: list[TouchedGradients] = []
        self._known: dict[str, Participant] = {}
        for each in ending:
            touched.append(each.touched(final))
            self._known[each.name] = each
        self._record = PassRecord(tuple(sorted(touched, key=_NAME)))
        self._members = len(self._process_set.ranks or ())
        self.concluded: dict[Participant, Conclusion] = {}
        self.idle = False
        self._comparison: Comparison | None = None
        self._samples: Samples | None = None
        self._sent = SentLooks()
        if self._members > 1:
            number, generation = self._process_set.process_set_id, running().generation
            common = _rounds_of.get(number)
            if common is None or common.generation != generation:
                line = next(each.line for each in participants() if each.process_set.process_set_id == number)
                common = _RoundsOfSet(generation, request_of(RECORD, line), samples_of(number))
                _rounds_of[number] = common
            self._samples = common.samples
            if self._samples is not None and self._samples.offers:
                self._sent = self._samples.taken()
            self._comparison = Comparison(
                RECORD,
                self._record.encode(),
                number,
                awaited=True,
                beside=self._sent.digest,
                request=common.request,
            )

    def conclude(self) -> None:
        """Wait for the records of all ranks, and draw the conclusions."""
        found = None
        if self._comparison is not None:
            found = self._comparison.wait()
            if self._comparison.members is not None:
                self._members = self._comparison.members
        if found is None:
            for each in self._record.optimizers:
                self.concluded[self._known[each.name]] = each.alone()
            return
        records = {rank: decode(encoded) for rank, encoded in found.items()}
        self.idle = is_idle(records)
        for name, conclusion in conclude(records).items():
            self.concluded[self._participant(name, records)] = conclusion

    def _participant(self, name: str, records: Mapping[int, PassRecord]) -> Participant:
        found = self._known.get(name)
        if found is not None:
            return found
        # Optimizers of earlier generations come last: one that only this rank still has must not take a name.
        for each in sorted(participants(), key=lambda each: not each.is_named):
            if each.process_set.process_set_id == self._process_set.process_set_id:
                each.prepare()
                if each.name == name:
                    if each.is_elsewhere():
                        raise AssertionError(_THREADS)
                    return each
        naming = [rank for rank, record in records.items() if any(each.name == name for each in record.optimizers)]
        here = "; ".join(f"{each.name} (made at {each.line})" for each in participants())
        raise MismatchError(
            f"Rank {naming[0]} reduces gradients of the optimizer {name}, which this rank does not have. It has: {here}. Every "
            "rank of a process set must make the same optimizers, over parameters of the same names and shapes, and keep them "
            "as long as any rank uses them.",
            ranks=naming,
            tensor=name,
        )

    def finish(self) -> BaseException | None:
        """Wait for the gradients of all optimizers. Returns the first error."""
        error: BaseException | None = None
        for participant, conclusion in self.concluded.items():
            try:
                participant.finish(conclusion, self._members)
                if self._comparison is not None and self._comparison.tuned is not None:
                    participant.tune(self._comparison.tuned)
            except BaseException as failure:
                error = error or failure
        if self._samples is not None and self._comparison is not None:
            try:
                if self._comparison.differs_beside:
                    self._samples.judge(self._comparison.gathered(self._sent.encode()))
            except BaseException as failure:
                error = error or failure
        return error
