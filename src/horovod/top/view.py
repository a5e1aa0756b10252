"""A snapshot of a job as a table. Pure but for rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from horovod.observe.live import JobSnapshot, RankView
from horovod.observe.progress import PHASES

_STALE_SECONDS = 10.0
"""A rank whose last report is older is shown as silent."""
_MOST_RANKS = 64
_SHORT = {"data loading": "data", "the update": "update", "its own work": "own work"}


def view(snapshot: JobSnapshot, most_ranks: int = _MOST_RANKS) -> RenderableType:
    """The table for the terminal.

    Args:
        most_ranks: the greatest number of ranks that are shown. Of more ranks, those that wait least are shown, because the
            others wait for them.
    """
    phases = [phase for phase in range(len(PHASES)) if any(each.phases[phase] >= 0.0005 for each in snapshot.ranks)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("host")
    for title in ("steps", "steps/s", "samples/s", "MB/s"):
        table.add_column(title, justify="right")
    for phase in phases:
        table.add_column(_SHORT.get(PHASES[phase], PHASES[phase]), justify="right")
    for title in ("communication", "waiting"):
        table.add_column(title, justify="right")
    table.add_column("now")
    shown = list(snapshot.ranks)
    if len(shown) > most_ranks:
        shown = sorted(sorted(shown, key=lambda each: each.waiting)[:most_ranks], key=lambda each: each.rank)
    for each in shown:
        table.add_row(*_row(each, phases), _now(each, snapshot.ranks))
    parts: list[RenderableType] = [Text(headline(snapshot), style="bold"), table]
    if len(shown) < len(snapshot.ranks):
        parts.append(Text(f"... and {len(snapshot.ranks) - len(shown)} ranks more, which wait longer"))
    if snapshot.lost:
        parts.append(Text(f"goes on without: {'; '.join(snapshot.lost)}"))
    if snapshot.straggler:
        parts.append(Text(snapshot.straggler, style="yellow"))
    return Group(*parts)


def headline(snapshot: JobSnapshot) -> str:
    """The job in one line."""
    hosts = len({each.host for each in snapshot.ranks})
    reported = [each for each in snapshot.ranks if each.age >= 0]
    rate = sum(each.steps_per_second for each in reported) / len(reported) if reported else 0.0
    samples = sum(each.samples_per_second for each in snapshot.ranks)
    parts = [
        f"{snapshot.size} rank{'s' * (snapshot.size > 1)} on {hosts} host{'s' * (hosts > 1)}",
        f"{_duration(snapshot.seconds)}",
        f"{rate:.2f} steps/s",
        *([f"{samples:.1f} samples/s"] if samples else []),
        f"{snapshot.recoveries} recover{'y' if snapshot.recoveries == 1 else 'ies'}",
    ]
    return " | ".join(parts)


def _row(each: RankView, phases: Sequence[int]) -> list[str]:
    if each.age < 0:
        return [str(each.rank), each.host, *["-"] * (6 + len(phases))]
    return [
        str(each.rank),
        each.host,
        str(each.steps),
        f"{each.steps_per_second:.2f}",
        f"{each.samples_per_second:.1f}" if each.samples_per_second else "-",
        f"{each.bytes_per_second / 1e6:.1f}",
        *(f"{each.phases[phase]:.0%}" for phase in phases),
        f"{each.communication:.0%}",
        f"{each.waiting:.0%}",
    ]


def _now(each: RankView, ranks: Sequence[RankView]) -> Text:
    """The text for what a rank does at this moment."""
    line = each.at.rpartition("/")[2]
    if each.awaits:
        return Text(f"waits for {each.awaits[0]}" + (f" at {line}" if line else ""))
    silent = each.age > _STALE_SECONDS and any(other.awaits for other in ranks)
    return Text(f"at {line}" if line else "", style="bold red" if silent else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
