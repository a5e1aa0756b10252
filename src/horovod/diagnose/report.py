"""The diagnosis as a text for people, and as JSON for tools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from horovod.diagnose.activity import main_activity, main_thread_of
from horovod.diagnose.dumped_job import DumpedJob, describe_ranks, duration, ordinal
from horovod.diagnose.finding import Finding

SCHEMA = 1
MOST_ROWS = 24
"""How many groups of ranks the text shows."""


class RankSummary(msgspec.Struct, frozen=True):
    """One rank in the JSON form.

    Attributes:
        wrote: whether it has written anything; if not, the fields that follow are empty.
        state: ``waiting`` for a collective, ``elsewhere`` in the script, ``held`` in native code, or ``unknown``.
        doing: what the main thread does, as text.
        call_site: the line of the script that the main thread is at.
        threads: the present line of each of its threads, the main thread first.
        last: the name of the last collective that it completed, which was the ``last_occurrence``-th of that name.
        idle_seconds: the seconds since that collective, when the rank wrote its file.
        waits_for: the name of the oldest collective that it waits for.
        waited_seconds: the seconds that it had waited.
    """

    rank: int
    host: str
    pid: int
    wrote: bool
    state: str
    doing: str = ""
    call_site: str = ""
    threads: list[str] = []
    last: str = ""
    last_occurrence: int = 0
    idle_seconds: float | None = None
    waits_for: str = ""
    waited_seconds: float | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """The whole JSON form; see ``docs/diagnose.md``."""

    schema: int
    job: str
    size: int
    why: str
    findings: list[Finding]
    ranks: list[RankSummary]
    silent: list[int]
    lost: list[str] = []


def diagnosis(job: DumpedJob, found: Sequence[Finding]) -> Diagnosis:
    """Everything that is known, for tools."""
    known = job.any
    name = known.job if known is not None else job.launcher.job if job.launcher is not None else ""
    why = known.why if known is not None else ""
    ranks = [_summary(job, rank) for rank in range(job.size)]
    return Diagnosis(SCHEMA, name, job.size, why, list(found), ranks, job.silent, job.lost)


def _summary(job: DumpedJob, rank: int) -> RankSummary:
    dump = job.dumps.get(rank)
    if dump is None:
        frames = main_thread_of(job.stacks.get(rank, ""))
        location = next((frame for frame in frames if frame.users), frames[0] if frames else None)
        line = "" if location is None else f"{location.file}:{location.line}"
        state = "held" if rank in job.stacks else "unknown"
        return RankSummary(rank, job.host(rank), 0, False, state, call_site=line)
    doing, last = main_activity(dump), job.last(rank)
    open_ = [each for each in dump.collectives if each.ended is None]
    oldest = min(open_, key=lambda each: each.submitted, default=None)
    location = doing.location
    threads = [
        f"{thread.name}: {thread.location.file}:{thread.location.line} in {thread.location.function}"
        for thread in dump.threads
        if thread.location is not None and not thread.own
    ]
    return RankSummary(
        rank,
        dump.host,
        dump.pid,
        True,
        "waiting" if oldest is not None else "elsewhere",
        doing.does,
        "" if location is None else f"{location.file}:{location.line}",
        threads,
        "" if last is None else last.name,
        0 if last is None else last.occurrence,
        job.idle(rank),
        "" if oldest is None else oldest.name,
        None if oldest is None else job.waited(rank, oldest),
    )


def text(job: DumpedJob, found: Sequence[Finding]) -> str:
    """The diagnosis as text."""
    known = job.any
    lines = ["What happened", *(f"  {each.text}" for each in found)]
    if known is not None:
        lines += ["", f"Where the ranks are (written because of a {known.why}: {known.reason.splitlines()[0]})"]
        lines += _rows(job)
    if job.lost:
        lines += ["", "The job had gone on without these ranks before", *(f"  {each}" for each in job.lost)]
    if job.silent and known is not None:
        lines += ["", f"{describe_ranks(job.silent).capitalize()} of {job.size} ranks: nothing was written. The files of other "
                      "hosts may have to be fetched first."]  # fmt: skip
    return "\n".join(lines)


def _rows(job: DumpedJob) -> list[str]:
    """The rows with the lines of the ranks; ranks at the same line share a row."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in range(job.size):
        if rank in job.dumps:
            groups.setdefault(_row(job, rank), []).append(rank)
        elif rank in job.stacks:
            summary = _summary(job, rank)
            groups.setdefault((f"in native code that keeps the interpreter, at {summary.call_site}",), []).append(rank)
    rows: list[str] = []
    for texts, ranks in list(groups.items())[:MOST_ROWS]:
        host = f" (host {job.host(ranks[0])})" if len({job.host(rank) for rank in ranks}) == 1 else ""
        rows.append(f"  {describe_ranks(ranks)}{host}: {texts[0]}")
        rows += [f"      {line}" for line in texts[1:]]
    if len(groups) > MOST_ROWS:
        rows.append(f"  and {len(groups) - MOST_ROWS} more groups of ranks (--json has all)")
    return rows


def _row(job: DumpedJob, rank: int) -> tuple[str, ...]:
    summary, dump = _summary(job, rank), job.dumps[rank]
    lines = [str(main_activity(dump))]
    if summary.waits_for:
        waiting = next(each for each in dump.collectives if each.ended is None and each.name == summary.waits_for)
        which = f" (the {ordinal(waiting.occurrence)} of that name)" if waiting.occurrence > 1 else ""
        lines.append(
            f"has {'been inside' if waiting.order else 'waited for'} '{waiting.name}'{which} for "
            f"{duration(summary.waited_seconds or 0.0)}, submitted at {waiting.call_site}"
        )
    elif summary.last:
        lines.append(f"its last collective was '{summary.last}' (the {ordinal(summary.last_occurrence)} of that name)")
    lines += [f"thread {line}" for line in summary.threads[1:9]]
    return tuple(lines)
