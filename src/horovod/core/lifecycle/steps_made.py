"""The numbers of steps of this rank's optimizers, and of its calls of process groups, which the ranks compare when they leave.

A rank that leaves sends its numbers with the message that it sends anyway. The coordinator passes those of the first to leave
on to all, and every other rank compares its own with them when it leaves itself. So the comparison costs no message and waits
for no rank. Numbers count from the beginning of the generation, or from the last ``hvd.join()`` of all ranks, before which
ranks may make different numbers of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.negotiation.messages import StepsMade, Stop

_MOST = 256
"""How many optimizers and groups are counted."""
_SHOWN = 2
"""How many optimizers and groups a text names."""
_CAUSE = (
    "The ranks have different numbers of batches, or some ranks skip a step, and their parameters differ now. Call hvd.join() "
    "after the last batch, or give every rank the same number of batches (drop_last=True)."
)
_CAUSE_OF_CALLS = (
    "The ranks have different numbers of batches, or some ranks skip a call, so tensors of different steps may have been "
    "reduced together. Give every rank the same number of batches (drop_last=True), or use the DDP model's join()."
)


class StepCount:
    """The number of steps of one optimizer, which the optimizer increases, or of calls of one process group."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 0


class StepCounts:
    """The numbers of all optimizers and process groups in one generation. They outlive the optimizers and groups."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...]], tuple[StepCount, str, bool]] = {}
        self._before = False

    def of(self, name: str, ranks: Sequence[int], line: str, calls: bool = False) -> StepCount:
        """The count of an optimizer or a process group.

        Args:
            name: the same on all ranks that have the optimizer or the group.
            ranks: the ranks that reduce its gradients, or the members, including this rank.
            line: the line of the script that made it.
            calls: whether it is a process group.
        """
        key = name, tuple(ranks)
        if key not in self._counts:
            if len(self._counts) == _MOST:
                return StepCount()
            self._counts[key] = StepCount(), line, calls
        return self._counts[key][0]

    @property
    def begun(self) -> bool:
        """Whether this rank has made a step or a call in this generation."""
        return self._before or any(count.made for count, _, _ in self._counts.values())

    def count_anew(self) -> None:
        """Count from 0: until now the ranks may have made different numbers of steps."""
        self._before = self.begun
        for count, _, _ in self._counts.values():
            count.made = 0

    def sent(self) -> list[StepsMade]:
        """The counts as sent to the other ranks."""
        return [
            StepsMade(name, ranks, count.made, line, calls)
            for (name, ranks), (count, line, calls) in self._counts.items()
        ]

    def describe(self) -> str:
        """The numbers of steps as the end of the sentence "rank N has left ..."."""
        made = sorted([each for each in self.sent() if each.steps], key=lambda each: each.calls)
        if not made:
            return ""
        shown = ", ".join(f"{_number(each)} of {_counted(each)}" for each in made[:_SHOWN])
        more = " and others" if len(made) > _SHOWN else ""
        advice = "uses the DDP model's join()" if made[0].calls else "calls hvd.join() first"
        return f" after {shown}{more} (a rank with fewer batches than others {advice})"

    def difference(self, rank: int, first: Stop) -> str:
        """How this rank's numbers of steps differ from those of the first rank that has left; "" if they do not.

        Optimizers and groups that only one of the two ranks has are not compared.
        """
        theirs = {(each.optimizer, each.ranks): each.steps for each in first.steps}
        differing = [each for each in self.sent() if theirs.get((each.optimizer, each.ranks), each.steps) != each.steps]
        if not differing:
            return ""
        calls = all(each.calls for each in differing)
        shown = [
            f"{_counted(each)}: {_number(each)} on rank {rank}, {theirs[each.optimizer, each.ranks]} on rank {first.rank}"
            for each in differing[:_SHOWN]
        ]
        if len(differing) > _SHOWN:
            shown.append(f"and {len(differing) - _SHOWN} more")
        what, cause = ("calls", _CAUSE_OF_CALLS) if calls else ("steps", _CAUSE)
        return f"Ranks have left with different numbers of {what} of {'; of '.join(shown)}. {cause}"


def _number(made: StepsMade) -> str:
    return f"{made.steps} {'call' if made.calls else 'step'}{'' if made.steps == 1 else 's'}"


def _counted(made: StepsMade) -> str:
    what = "process group" if made.calls else "optimizer"
    return f"the {what} made at {made.line}" if made.line else made.optimizer
