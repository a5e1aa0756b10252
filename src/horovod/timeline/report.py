"""A summary as text and tables."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.observe.all_ranks import PHASE_NAMES
from horovod.timeline.all_ranks import StepTotal
from horovod.timeline.summary import OperationTotal, RankTotal, Summary, TensorTotal

MOST_TENSORS = 10

OPERATION_TITLES = ("operation", "engine", "batches", "tensors", "MB", "ms", "MB/s", "bus MB/s")
RANK_TITLES = ("rank", "waited ms", "share", "was last", "cost others ms", "most before")
STEP_TITLES = ("rank", "steps", *(f"{name} ms" for name in PHASE_NAMES), "carried out ms", "overlap")
TENSOR_TITLES = ("tensor", "times", "MB", "waited ms", "its batches ms")


def text(summary: Summary, steps: Sequence[StepTotal] = ()) -> str:
    """The output of ``python -m horovod.timeline``.

    Args:
        steps: of all ranks, if the timeline has them.
    """
    tensors = tensor_table(summary.tensors)
    more = len(summary.tensors) - MOST_TENSORS
    parts = [
        "\n".join([*sentences(summary), *overlap_sentences(steps)]),
        _aligned([OPERATION_TITLES, *operation_table(summary.operations)]),
        _aligned([RANK_TITLES, *rank_table(summary.ranks, summary.seconds)]),
        _aligned([TENSOR_TITLES, *tensors]) + (f"\n... and {more} tensors more" if more > 0 else ""),
    ]
    if steps:
        parts.append(_aligned([STEP_TITLES, *step_table(steps)]))
    return "\n\n".join(parts)


def overlap_sentences(steps: Sequence[StepTotal]) -> list[str]:
    """Sentences about the share of the communication that the script did not wait for; empty if it is not known."""
    carried_out = sum(each.carried_out for each in steps)
    if not carried_out:
        return []
    hidden = sum(each.hidden for each in steps) / carried_out
    return [
        f"While collectives were carried out, the ranks computed in {hidden:.1%} of the time, and waited in the rest."
    ]


def step_table(steps: Sequence[StepTotal]) -> list[tuple[str, ...]]:
    """Milliseconds a step."""
    return [
        (
            str(each.rank),
            str(each.steps),
            *(f"{each.phases[name] * 1e3 / max(1, each.steps):.2f}" for name in PHASE_NAMES),
            f"{each.carried_out * 1e3 / max(1, each.steps):.2f}",
            f"{each.hidden / each.carried_out:.1%}" if each.carried_out else "-",
        )
        for each in steps
    ]


def sentences(summary: Summary) -> list[str]:
    """The conclusions from the numbers, the most important last."""
    tensors = sum(each.tensors for each in summary.operations)
    found = [
        f"{summary.seconds:.3f} s with {len(summary.ranks)} ranks: {tensors} tensors in {len(summary.batches)} batches.",
        f"Of that time collectives were carried out in {summary.carried_out / summary.seconds:.1%}, a rank that had submitted "
        f"waited for others or for the agreement in {summary.waiting / summary.seconds:.1%}, and nothing was submitted in "
        f"{summary.idle / summary.seconds:.1%}.",
    ]
    if summary.straggler is not None:
        slow = next(each for each in summary.ranks if each.rank == summary.straggler)
        found.append(
            f"Rank {slow.rank} holds up the others: it costs them {slow.lost / summary.seconds:.0%} of the time, most of it "
            f"before '{slow.before}'."
        )
    return found


def operation_table(totals: Sequence[OperationTotal]) -> list[tuple[str, ...]]:
    return [
        (
            each.operation.lower(),
            each.engine,
            str(each.batches),
            str(each.tensors),
            f"{each.bytes / 1e6:.3f}",
            f"{each.seconds * 1e3:.2f}",
            _rate(each.bytes, each.seconds),
            _rate(each.bus_bytes, each.seconds),
        )
        for each in totals
    ]


def rank_table(totals: Sequence[RankTotal], seconds: float) -> list[tuple[str, ...]]:
    return [
        (
            str(each.rank),
            f"{each.waited * 1e3:.2f}",
            f"{each.waited / seconds:.1%}",
            str(each.last),
            f"{each.lost * 1e3:.2f}",
            each.before,
        )
        for each in totals
    ]


def tensor_table(totals: Sequence[TensorTotal]) -> list[tuple[str, ...]]:
    return [
        (
            each.tensor,
            str(each.times),
            f"{each.bytes / 1e6:.3f}",
            f"{each.waited * 1e3:.2f}",
            f"{each.carried_out * 1e3:.2f}",
        )
        for each in totals[:MOST_TENSORS]
    ]


def _rate(amount: float, seconds: float) -> str:
    return f"{amount / seconds / 1e6:.1f}" if seconds > 0 else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not all(_is_number(row[column]) for row in rows[1:]) for column in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    )


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.rstrip("%").replace(".", "", 1).isdigit()
