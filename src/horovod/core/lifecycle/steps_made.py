"""The numbers of steps that this rank's optimizers have made, which the ranks compare when they leave.

A rank that leaves sends its numbers with the message that it sends anyway. The coordinator passes those of the first to leave
on to all, and every other rank compares its own with them when it leaves itself. So the comparison costs no message and waits
for no rank. Numbers count from the beginning of the generation, or from the last ``hvd.join()`` of all ranks, before which
ranks may make different numbers of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.negotiation.messages import StepsMade, Stop

_MOST = 256
"""How many optimizers are counted."""
_SHOWN = 2
"""How many optimizers a text names."""
_CAUSE = (
    "The ranks have different numbers of batches, or some ranks skip a step, and their parameters differ now. Call hvd.join() "
    "after the last batch, or give every rank the same number of batches (drop_last=True)."
)


class StepCount:
    """The number of steps of one optimizer, which the optimizer increases."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 0


class StepCounts:
    """The numbers of steps of all optimizers in one generation. They outlive the optimizers."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], tuple[StepCount, str]] = {}

    def of(self, name: str, ranks: Sequence[int], line: str) -> StepCount:
        """The count of an optimizer.

        Args:
            name: the same on all ranks that have the optimizer.
            ranks: the ranks that reduce its gradients, including this rank.
            line: the line of the script that made it.
        """
        key = name, tuple(ranks)
        if key not in self._counts:
            if len(self._counts) == _MOST:
                return StepCount()
            self._counts[key] = StepCount(), line
        return self._counts[key][0]

    def count_anew(self) -> None:
        """Count from 0: until now the ranks may have made different numbers of steps."""
        for count, _ in self._counts.values():
            count.made = 0

    def told(self) -> list[StepsMade]:
        """The counts as sent to the other ranks."""
        return [StepsMade(name, ranks, count.made, line) for (name, ranks), (count, line) in self._counts.items()]

    def describe(self) -> str:
        """The numbers of steps as the end of the sentence "rank N has left ..."."""
        made = [each for each in self.told() if each.steps]
        if not made:
            return ""
        shown = ", ".join(f"{_steps(each.steps)} of {_optimizer(each)}" for each in made[:_SHOWN])
        more = " and others" if len(made) > _SHOWN else ""
        return f" after {shown}{more} (a rank with fewer batches than others calls hvd.join() first)"

    def difference(self, rank: int, first: Stop) -> str:
        """How this rank's numbers of steps differ from those of the first rank that has left; "" if they do not.

        Optimizers that only one of the two ranks has are not compared.
        """
        theirs = {(each.optimizer, each.ranks): each.steps for each in first.steps}
        differing = []
        for each in self.told():
            other = theirs.get((each.optimizer, each.ranks), each.steps)
            if other != each.steps:
                differing.append(
                    f"{_optimizer(each)}: {_steps(each.steps)} on rank {rank}, {other} on rank {first.rank}"
                )
        if not differing:
            return ""
        shown = differing[:_SHOWN] + ([f"and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else [])
        return f"Ranks have left with different numbers of steps of {'; of '.join(shown)}. {_CAUSE}"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _optimizer(made: StepsMade) -> str:
    return f"the optimizer made at {made.line}" if made.line else made.optimizer
