"""A job as the files of its ranks describe it: the collectives in flight of each process set, and the earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from horovod.diagnose.clocks import Offset, offsets
from horovod.observe.dump import CollectiveRecord, Folder, RankDump


class UnfinishedCollective(NamedTuple):
    """A collective that has not ended.

    Attributes:
        holders: the records of the ranks that have submitted it, by rank.
        running: the ranks that carry it out.
        missing: the ranks that have not submitted it.
        unknown: the members that have written no file.
    """

    process_set: int
    name: str
    holders: dict[int, CollectiveRecord]
    running: list[int]
    missing: list[int]
    unknown: list[int]

    @property
    def first(self) -> CollectiveRecord:
        return self.holders[min(self.holders)]


class DumpedJob:
    """The data about a job.

    Attributes:
        dumps: by rank, the contents of its file.
        stacks: by rank, the stacks of a rank that could not write its file, as text.
        clocks: by rank, the offset that aligns its times.
    """

    def __init__(self, folder: Folder) -> None:
        self.dumps = folder.ranks
        self.stacks = {rank: text for rank, text in folder.stacks.items() if rank not in folder.ranks}
        self.launcher = folder.launcher
        self.clocks: dict[int, Offset] = offsets(self.dumps)
        exits = [each.rank for each in folder.launcher.exits] if folder.launcher is not None else []
        self.size = max((dump.size for dump in self.dumps.values()), default=max(exits, default=-1) + 1)

    @property
    def silent(self) -> list[int]:
        """The ranks that have written no file."""
        return [rank for rank in range(self.size) if rank not in self.dumps]

    @property
    def any(self) -> RankDump | None:
        return next(iter(self.dumps.values()), None)

    @property
    def lost(self) -> list[str]:
        """The ranks that an elastic job had gone on without before; the latest."""
        return [] if self.any is None else self.any.lost

    def host(self, rank: int) -> str:
        known = self.any
        return known.hosts[rank] if known is not None and rank < len(known.hosts) else "?"

    def time(self, rank: int, moment: float) -> float:
        """A rank's time on the common clock."""
        return moment + self.clocks[rank].seconds

    @property
    def end(self) -> float:
        """When the last rank wrote, on the common clock."""
        return max((self.time(rank, dump.monotonic) for rank, dump in self.dumps.items()), default=0.0)

    def members(self) -> dict[int, list[int]]:
        """By process set, its ranks."""
        found: dict[int, list[int]] = {}
        for dump in self.dumps.values():
            for each in dump.process_sets:
                found.setdefault(each.id, each.ranks)
        return dict(sorted(found.items()))

    def collectives(self, rank: int, process_set: int) -> list[CollectiveRecord]:
        """A rank's records of a process set, in the order of submission."""
        found = [each for each in self.dumps[rank].collectives if each.process_set == process_set]
        return sorted(found, key=lambda each: each.number)

    def waiting(self) -> list[UnfinishedCollective]:
        """All collectives that are not over on some rank, the oldest first."""
        found: list[UnfinishedCollective] = []
        for number, ranks in self.members().items():
            present = [rank for rank in ranks if rank in self.dumps]
            unknown = [rank for rank in ranks if rank not in self.dumps]
            known = {rank: self.collectives(rank, number) for rank in present}
            names = dict.fromkeys(each.name for rank in present for each in known[rank] if each.ended is None)
            found += [self._waiting(number, name, known, unknown) for name in names]
        return sorted(found, key=self._since)

    def _waiting(
        self, number: int, name: str, known: dict[int, list[CollectiveRecord]], unknown: list[int]
    ) -> UnfinishedCollective:
        holders: dict[int, CollectiveRecord] = {}
        missing: list[int] = []
        pending = [each for records in known.values() for each in records if each.name == name and each.ended is None]
        occurrence, latest = max(each.occurrence for each in pending), max(each.order for each in pending)
        for rank, records in known.items():
            own = next((each for each in reversed(records) if each.name == name), None)
            if own is None or (own.ended is not None and (own.order < latest or own.occurrence < occurrence)):
                missing.append(rank)
            else:
                holders[rank] = own
        running = [rank for rank, each in holders.items() if each.state == "running"]
        return UnfinishedCollective(number, name, holders, running, missing, unknown)

    def _since(self, item: UnfinishedCollective) -> float:
        return min(self.time(rank, each.submitted) for rank, each in item.holders.items())

    def waited(self, rank: int, record: CollectiveRecord) -> float:
        """For how long a rank has waited for a collective when it wrote."""
        return max(0.0, self.dumps[rank].monotonic - record.submitted)

    def last(self, rank: int) -> CollectiveRecord | None:
        """The last collective that a rank has completed, of any process set."""
        over = [each for each in self.dumps[rank].collectives if each.ended is not None and not each.error]
        return max(over, key=lambda each: each.ended or 0.0, default=None)

    def idle(self, rank: int) -> float | None:
        """For how long a rank had completed no collective when it wrote."""
        last = self.last(rank)
        return None if last is None or last.ended is None else self.dumps[rank].monotonic - last.ended

    def predicted(self, rank: int, process_set: int) -> list[str]:
        """The names that are due next by the set's past: those that followed its last completed collective the time before.

        If this is the first of its name, a step may have ended: then all names from the beginning.
        """
        order = sorted(
            (each for each in self.collectives(rank, process_set) if each.order and each.ended is not None),
            key=lambda each: each.order,
        )
        names = [each.name for each in order]
        if not names:
            return []
        earlier = [index for index, name in enumerate(names[:-1]) if name == names[-1]]
        return names[earlier[-1] + 1 :] if earlier else names


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2 and 5``."""
    spans = list(_spans(sorted(ranks)))
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    text = texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" and {texts[-1]}"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _spans(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = before = None
    for rank in ordered:
        if before is None or start is None:
            start = rank
        elif rank != before + 1:
            yield start, before
            start = rank
        before = rank
    if start is not None and before is not None:
        yield start, before


def ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def duration(seconds: float) -> str:
    """A duration as text."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def named(name: str, occurrence: int) -> str:
    """A collective, with its number where its name has come before."""
    return f"'{name}'" if occurrence <= 1 else f"'{name}' (the {ordinal(occurrence)} of that name)"


def describe_waiters(item: UnfinishedCollective, seconds: float | None = None) -> str:
    """The ranks that wait for it, for how long if that is given, and where it was submitted."""
    holders = [rank for rank, each in item.holders.items() if each.ended is None]
    one = len(holders) == 1
    waits, have = ("waits", "has") if one else ("wait", "have")
    verb = waits if seconds is None else f"{have} been waiting {duration(seconds)}"
    return (
        f"{describe_ranks(holders).capitalize()} {verb} for {named(item.name, item.first.occurrence)}, submitted at "
        f"{item.first.call_site or 'an unknown line'}."
    )


def longest(job: DumpedJob, item: UnfinishedCollective) -> float:
    """For how many seconds a rank has waited for it."""
    return max(job.waited(rank, each) for rank, each in item.holders.items() if each.ended is None)
