"""The rules about the failure that the runtime has decided on: which rank, how it ended, and which ranks waited for it.
Pure."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence

from horovod.diagnose.dumped_job import DumpedJob, describe_ranks, describe_waiters, longest, named
from horovod.diagnose.finding import Finding
from horovod.observe.dump import RankDump


def failure(job: DumpedJob) -> list[Finding]:
    """The finding about the rank that failed first; empty if none has failed, or if the collectives in flight say more."""
    failed = [dump for dump in job.dumps.values() if dump.why == "failure"]
    if not failed:
        return _only_the_launcher_knows(job)
    rank, kind, reason = Counter((each.failed_rank, each.failure_kind, each.reason) for each in failed).most_common(1)[
        0
    ][0]
    who = f"Rank {rank} (host {job.host(rank)})"
    waiting = _waits_for(job, rank)
    broken = _broken_link(job, failed) if kind == "LOST" else None
    if broken is not None:
        return [broken]
    if kind == "RAISED":
        what = reason.removeprefix("it ")
        return [Finding("raised", [rank], f"{who} {what}.{_hint(reason)}{waiting}", waiting=_waiters(job, rank))]
    if kind == "ENGINE":
        return [Finding("engine", [rank], f"{who} failed: {reason}.{waiting}", waiting=_waiters(job, rank))]
    if kind == "TIME_LIMIT":
        return []  # the rules about what is in flight say why
    if "left the job" in reason:
        text = f"{who} ended its script, or called hvd.shutdown(), while others still waited for a collective.{waiting}"
        return [Finding("left", [rank], text, waiting=_waiters(job, rank))]
    if "is stopped" in reason:
        text = f"{who} does not run: its process is stopped (SIGSTOP, Ctrl-Z, or a debugger).{waiting}"
        return [Finding("stopped", [rank], text, waiting=_waiters(job, rank))]
    if "its process ended" in reason:
        text = f"{who} ended without reporting an error: {_how_it_ended(job, rank)}.{_memory(job, rank)}{waiting}"
        return [Finding("killed", [rank], text, waiting=_waiters(job, rank))]
    return [Finding("lost", [rank], f"{who} is lost: {reason}.{waiting}", waiting=_waiters(job, rank))]


def _broken_link(job: DumpedJob, failed: Sequence[RankDump]) -> Finding | None:
    """Ranks that were lost by others and have written at the same time themselves: the network between them is broken."""
    lost = sorted({each.failed_rank for each in failed})
    alive = [
        rank
        for rank in lost
        if rank in job.dumps and job.dumps[rank].why == "failure" and not job.dumps[rank].exception
    ]
    pairs = {tuple(sorted((each.host, job.host(each.failed_rank)))) for each in failed if each.failed_rank in alive}
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    if not alive or not pairs:
        return None
    sides: dict[int, list[int]] = {}
    for each in failed:
        sides.setdefault(each.failed_rank, []).append(each.rank)
    losses = " and ".join(
        f"{describe_ranks(ranks)} ({', '.join(sorted({job.host(rank) for rank in ranks}))}) lost rank {rank} ({job.host(rank)})"
        for rank, ranks in sorted(sides.items())
    )
    if len(pairs) == 1:
        one, two = next(iter(pairs))
        what = f"The link between host {one} and host {two} is broken"
    else:
        host, times = Counter(host for pair in pairs for host in pair).most_common(1)[0]
        what = (
            f"The network of host {host} is broken"
            if times == len(pairs)
            else "The network between the hosts is broken"
        )
    waiting = next((f" {describe_waiters(item, longest(job, item))}" for item in job.waiting()), "")
    text = f"{what}: {losses}, and all these ranks run.{waiting} Look at the cable, the switch and the firewall between them."
    return Finding("link", lost, text, waiting=sorted(job.dumps))


def _only_the_launcher_knows(job: DumpedJob) -> list[Finding]:
    launcher = job.launcher
    if launcher is None or launcher.first < 0 or job.dumps:
        return []
    text = f"Rank {launcher.first} failed first: {_how_it_ended(job, launcher.first)}. {launcher.reason}".strip()
    return [Finding("lost", [launcher.first], text)]


def _how_it_ended(job: DumpedJob, rank: int) -> str:
    exits = [each for each in job.launcher.exits if each.rank == rank] if job.launcher is not None else []
    if exits and exits[0].signal:
        name = {int(each): each.name for each in signal.Signals}.get(exits[0].signal, f"signal {exits[0].signal}")
        return f"its process was killed by {name}"
    if exits:
        return f"its process ended with exit code {exits[0].code}"
    return "its process crashed or was killed, or its host went away"


def _memory(job: DumpedJob, rank: int) -> str:
    host = job.host(rank)
    counts = [dump.killed_for_memory for dump in job.dumps.values() if dump.host == host]
    most = max(counts, default=-1)
    if most > 0:
        return (
            f" The system of host {host} has ended {most} process{'es' * (most > 1)} for lack of memory since the job began: "
            "most likely it was this one."
        )
    exits = [each for each in job.launcher.exits if each.rank == rank] if job.launcher is not None else []
    if exits and exits[0].signal == 9:
        return (
            " Nothing in Horovod sends SIGKILL to a running rank. The system does when memory runs out, in the rank's control "
            f"group or on the host ({'it has counted no such case' if most == 0 else 'whether it has is not known'}); batch "
            "systems and people do, too."
        )
    return ""


_HINTS = (
    (
        r"Errno 28|No space left|PytorchStreamWriter failed",
        "A disk or a quota is full: free some space, or write elsewhere.",
    ),
    (r"CUDA out of memory|OutOfMemoryError|MemoryError", "Memory ran out: a smaller batch needs less."),
    (r"Errno 122", "A quota of the file system is used up."),
    (r"Errno 24|Too many open files", "The process has too many open files: raise the limit (ulimit -n)."),
    (r"EOFError: EOF when reading a line", "Only one rank can read standard input: horovodrun --stdin RANK."),
)


def _hint(reason: str) -> str:
    return next((f" {text}" for pattern, text in _HINTS if re.search(pattern, reason)), "")


def _waiters(job: DumpedJob, culprit: int) -> list[int]:
    return sorted({rank for item in job.waiting() for rank in item.holders if rank != culprit})


def _waits_for(job: DumpedJob, culprit: int) -> str:
    """The ranks that wait because of a rank, and for what."""
    for item in job.waiting():
        holders = {rank: each for rank, each in item.holders.items() if rank != culprit and each.ended is None}
        if not holders or (culprit in item.holders and item.holders[culprit].ended is not None):
            continue
        holders = {
            rank: each for rank, each in holders.items() if not each.order
        } or holders  # others are about to go on
        first = holders[min(holders)]
        verb = "waits" if len(holders) == 1 else "wait"
        return (
            f" {describe_ranks(list(holders)).capitalize()} {verb} for it in {named(item.name, first.occurrence)}"
            f" ({first.call_site or 'unknown line'})."
        )
    return ""
