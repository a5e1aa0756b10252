"""The rules that say what happened in a job. Pure: a :class:`DumpedJob` in, findings out, the most important first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from horovod.diagnose import stragglers
from horovod.diagnose.activity import main_activity, main_thread_of
from horovod.diagnose.dumped_job import (
    DumpedJob,
    UnfinishedCollective,
    describe_ranks,
    describe_waiters,
    duration,
    longest,
    named,
)
from horovod.diagnose.failures import failure
from horovod.diagnose.finding import Finding
from horovod.observe.dump import TensorRecord


def findings(job: DumpedJob) -> list[Finding]:
    """The findings, the most important first; never empty."""
    found = [*failure(job), *_mismatch(job)]
    ended = {rank for each in found for rank in each.ranks if each.kind in ("raised", "killed", "left", "lost", "link")}
    waiting = job.waiting()
    for item in _main_of_each_set(job, waiting):
        if not _is_running(job, item):
            found += _of_waiting(job, item, waiting, ended)
    if any(each.kind == "mismatch" for each in found):  # what follows from it
        found = [each for each in found if each.kind not in ("left", "raised")]
    found.sort(key=lambda each: _ORDER.index(each.kind))
    if not found:
        found += stragglers.findings(job)
    return found or [Finding("nothing", [], "No rank waits for another, and none has failed.")]


_RUNNING_SECONDS = 1.0
"""For how long all ranks may be in a collective without a finding, if a job was only asked what it does."""


def _is_running(job: DumpedJob, item: UnfinishedCollective) -> bool:
    """Whether all ranks were in this collective for a moment when the job was asked what it does."""
    asked = all(dump.why == "request" for dump in job.dumps.values())
    return asked and not item.missing and not item.unknown and longest(job, item) < _RUNNING_SECONDS


_ORDER = (
    "mismatch",
    "raised",
    "link",
    "killed",
    "stopped",
    "held",
    "lost",
    "engine",
    "apart",
    "silent",
    "inside",
    "left",
)


def _main_of_each_set(job: DumpedJob, waiting: list[UnfinishedCollective]) -> list[UnfinishedCollective]:
    """For each process set, the collective that was due next by its history; else the one that most ranks have submitted."""
    found: dict[int, UnfinishedCollective] = {}
    for number in dict.fromkeys(item.process_set for item in waiting):
        items = [item for item in waiting if item.process_set == number]
        expected = _expected(job, items)
        most = max(len(item.holders) for item in items)
        found[number] = next(
            (item for item in items if item.name == expected), next(item for item in items if len(item.holders) == most)
        )
    return list(found.values())


def _expected(job: DumpedJob, items: Sequence[UnfinishedCollective]) -> str:
    """The one of these names that is due first by the history of their process set; "" if the history does not show it."""
    names = {item.name for item in items}
    ranks = sorted({rank for item in items for rank in item.holders})
    return next((name for name in job.predicted(ranks[0], items[0].process_set) if name in names), "")


# Collectives that ranks disagree about.


def _mismatch(job: DumpedJob) -> list[Finding]:
    for rank, dump in job.dumps.items():
        failed = [
            each for each in dump.collectives if each.error.startswith(("Mismatched", "Process-set rank zero tried"))
        ]
        if not failed:
            continue
        last = failed[-1]
        done_since = [
            each for each in dump.collectives if each.process_set == last.process_set and each.order > last.order
        ]
        if len(done_since) > 1:
            continue  # the script has gone on
        lines: dict[int, str] = {}
        views: dict[str, list[int]] = {}
        for other in job.dumps:
            own = next((each for each in job.collectives(other, last.process_set) if each.order == last.order), None)
            if own is not None:
                lines[other] = own.call_site
                views.setdefault(_view(own.operation, own.tensors), []).append(other)
        odd = _minority(views)
        parts = [f"{describe_ranks(ranks)} submitted {view}, at {lines[ranks[0]]}" for view, ranks in views.items()]
        text = (
            f"The ranks disagree about {named(last.name, last.occurrence)}: {'; '.join(parts)}. "
            f"{last.error.splitlines()[0].partition(' Tensor ')[0]}"
        )
        return [Finding("mismatch", odd or [rank], text, last.name, last.process_set, last.occurrence, [], lines)]
    return []


def _view(operation: str, tensors: Sequence[TensorRecord]) -> str:
    shown = ", ".join(f"{each.dtype} {each.shape}" for each in tensors[:3])
    return f"{operation.lower()} of {shown}" if shown else operation.lower()


def _minority(groups: dict[str, list[int]]) -> list[int]:
    """The members of all groups but the largest; empty if no group is the largest."""
    sizes = sorted((len(ranks) for ranks in groups.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return []
    largest = max(groups, key=lambda each: len(groups[each]))
    return sorted(rank for view, ranks in groups.items() if view != largest for rank in ranks)


# Collectives that are not over.


def _of_waiting(
    job: DumpedJob, item: UnfinishedCollective, every: list[UnfinishedCollective], ended: set[int]
) -> list[Finding]:
    stopped = _stopped(job)
    found: list[Finding] = []
    unheard = [rank for rank in item.unknown if rank not in ended]
    for rank in [*unheard, *item.missing]:
        if rank in stopped:
            found.append(_stopped_finding(job, item, rank))
        elif rank in job.stacks:
            found.append(_held(job, item, rank))
    reported = {rank for each in found for rank in each.ranks} | ended
    missing = [rank for rank in item.missing if rank not in reported]
    if missing:
        found += _apart(job, item, every, missing) or [_silent(job, item, rank) for rank in missing]
    elif not found and not unheard and not ended:
        found.append(_inside(job, item))
    elif not found and unheard:
        verb, they = ("has", "it") if len(unheard) == 1 else ("have", "they")
        text = (
            f"{describe_ranks(unheard).capitalize()} {verb} written nothing, so it is not known what {they} did. "
            f"{describe_waiters(item)}"
        )
        found.append(Finding("lost", unheard, text, *_about(item)))
    return found


def _about(item: UnfinishedCollective) -> tuple[str, int, int, list[int], dict[int, str]]:
    lines = {rank: each.call_site for rank, each in item.holders.items()}
    holders = [rank for rank, each in item.holders.items() if each.ended is None]
    return item.name, item.process_set, item.first.occurrence, holders, lines


def _stopped(job: DumpedJob) -> set[int]:
    return {
        rank for dump in job.dumps.values() for rank, reason in dump.neighbours.items() if "is stopped" in reason
    } - set(job.dumps)


def _stopped_finding(job: DumpedJob, item: UnfinishedCollective, rank: int) -> Finding:
    text = (
        f"Rank {rank} (host {job.host(rank)}) does not run: its process is stopped (SIGSTOP, Ctrl-Z, or a debugger). "
        f"{describe_waiters(item, longest(job, item))}"
    )
    return Finding("stopped", [rank], text, *_about(item))


def _held(job: DumpedJob, item: UnfinishedCollective, rank: int) -> Finding:
    frames = main_thread_of(job.stacks[rank])
    users = next((frame for frame in frames if frame.users), frames[0] if frames else None)
    at = "" if users is None else f" at {users.file}:{users.line} in {users.function}"
    text = (
        f"Rank {rank} (host {job.host(rank)}) is in native code{at} that keeps Python's interpreter lock, so no thread of "
        f"it runs. {describe_waiters(item, longest(job, item))}"
    )
    return Finding("held", [rank], text, *_about(item))


def _silent(job: DumpedJob, item: UnfinishedCollective, rank: int) -> Finding:
    doing = main_activity(job.dumps[rank])
    idle, last = job.idle(rank), job.last(rank)
    before = "no collective at all" if last is None else f"nothing since {named(last.name, last.occurrence)}"
    since = "" if idle is None else f", which ended {duration(idle)} before"
    text = (
        f"Rank {rank} (host {job.host(rank)}) has not submitted {named(item.name, item.first.occurrence)}; it has "
        f"submitted {before}{since}. It {doing}. {describe_waiters(item, longest(job, item))}"
    )
    return Finding("silent", [rank], text, *_about(item))


def _apart(
    job: DumpedJob, item: UnfinishedCollective, every: list[UnfinishedCollective], missing: list[int]
) -> list[Finding]:
    """Ranks that have submitted other collectives instead."""
    others = [each for each in every if each.process_set == item.process_set and each is not item]
    own = {
        rank: [each for each in others if rank in each.holders and each.holders[rank].order == 0] for rank in missing
    }
    instead = {rank: each[0] for rank, each in own.items() if each and set(each[0].missing) & set(item.holders)}
    if not instead:
        return []
    expected = _expected(job, [item, *instead.values()])
    wrong = sorted(instead) if expected == item.name else _odd(item, instead)
    parts = [describe_waiters(item, longest(job, item))]
    by_name: dict[str, list[int]] = {}
    for rank, each in instead.items():
        by_name.setdefault(each.name, []).append(rank)
    for name, ranks in by_name.items():
        record = instead[ranks[0]].holders[ranks[0]]
        parts.append(
            f"{describe_ranks(ranks).capitalize()} submitted {named(name, record.occurrence)} instead, at {record.call_site}."
        )
    parts.append(_why_apart(job, item, instead, expected, wrong))
    lines = {rank: each.call_site for rank, each in item.holders.items()}
    lines |= {rank: each.holders[rank].call_site for rank, each in instead.items()}
    text = f"The ranks diverged at {named(item.name, item.first.occurrence)}. " + " ".join(filter(None, parts))
    waiting = sorted(set(item.holders) | set(instead))
    found = [Finding("apart", wrong, text, item.name, item.process_set, item.first.occurrence, waiting, lines)]
    return found + [_silent(job, item, rank) for rank in missing if rank not in instead]


def _odd(item: UnfinishedCollective, instead: dict[int, UnfinishedCollective]) -> list[int]:
    """The ranks to blame if ranks have diverged and the history does not show which: the minority; empty if there is none."""
    groups = {item.name: list(item.holders)}
    for rank, each in instead.items():
        groups.setdefault(each.name, []).append(rank)
    return _minority(groups)


def _why_apart(
    job: DumpedJob,
    item: UnfinishedCollective,
    instead: dict[int, UnfinishedCollective],
    expected: str,
    wrong: list[int],
) -> str:
    if not expected or not wrong:
        same_lines = len({each.call_site for each in item.holders.values()} | {
            each.holders[rank].call_site for rank, each in instead.items()
        }) == 1  # fmt: skip
        if same_lines:
            return "Both were submitted by the same line: the name, or the order of a loop, differs between the ranks."
        return (
            "These ranks call the collectives in another order, give one collective two names, or take different paths through "
            "the script."
        )
    history = job.predicted(min(item.holders), item.process_set)
    theirs = instead[wrong[0]].name
    if theirs in history and history.index(theirs) > history.index(expected):
        return (
            f"In the step before, '{theirs}' came after '{expected}' on all ranks: {describe_ranks(wrong)} skipped "
            f"'{expected}', or calls them in another order."
        )
    return (
        f"In the step before, '{expected}' came next on all ranks: {describe_ranks(wrong)} took another path through the "
        "script."
    )


def _inside(job: DumpedJob, item: UnfinishedCollective) -> Finding:
    """All ranks are in one collective, and it does not end."""
    seconds = longest(job, item)
    over = [rank for rank, each in item.holders.items() if each.ended is not None]
    inside = [rank for rank in item.holders if rank not in over]
    engine = next((each.engine for each in item.holders.values() if each.engine), "")
    agreed = any(each.order for each in item.holders.values())
    parts = [
        f"{describe_ranks(inside).capitalize()} {'has' if len(inside) == 1 else 'have'} been inside "
        f"{named(item.name, item.first.occurrence)} for {duration(seconds)}: every rank has submitted it "
        f"({item.first.call_site or 'unknown line'}), so the scripts agree."
    ]
    if over:
        parts.append(f"{describe_ranks(over).capitalize()} has finished it.")
    parts.append(_links(job, inside, engine if agreed else ""))
    return Finding("inside", sorted(inside), " ".join(filter(None, parts)), *_about(item))


def _links(job: DumpedJob, ranks: list[int], engine: str) -> str:
    """The finding about a data transfer that is stuck."""
    pairs: Counter[tuple[str, str]] = Counter()
    accused: Counter[int] = Counter()
    reasons: list[str] = []
    for rank in ranks:
        for report in job.dumps[rank].no_progress:
            pairs[min((a := job.host(rank)), (b := job.host(report.rank))), max(a, b)] += 1
            accused[report.rank] += 1
            reasons.append(f"rank {rank} says of rank {report.rank}: {report.reason}")
    by = f" by the engine {engine}" if engine else ""
    if not pairs:
        return f"It is carried out{by}, which has reported no problem yet: it may still complete."
    between = {pair for pair in pairs if pair[0] != pair[1]}
    said = f" ({reasons[0]})"
    if between and len(between) == 1 and not any(pair[0] == pair[1] for pair in pairs):
        one, two = next(iter(between))
        return (
            f"It is carried out{by}, and all complaints are between host {one} and host {two}{said}: look at the link "
            "between them, its switch and firewall."
        )
    if between:
        hosts = Counter(host for pair in between for host in pair)
        host, times = hosts.most_common(1)[0]
        if times == len(between):
            return f"It is carried out{by}, and every complaint across hosts concerns host {host}{said}: look at its network."
        which = ", ".join(" and ".join(pair) for pair in sorted(between))
        return f"It is carried out{by}, and complaints are between {which}{said}."
    rank, _ = accused.most_common(1)[0]
    doing = f" Its main thread {main_activity(job.dumps[rank])}." if rank in job.dumps else ""
    return f"It is carried out{by}; rank {rank} makes no progress{said}.{doing}"
