"""Proves that no rank of a job can continue: all threads of all ranks wait for each other. Pure; rank 0 calls it.

Every rank says what it waits for (:class:`Standing`) when it is asked. The proof has two parts:

- *At one moment no rank could continue.* Each thread waited for a collective or a message, and each of these lacked a rank that
  had not submitted its part. The threads that could have submitted it were among those that waited.
- *There was such a moment.* A rank's standing holds from its first answer to its last one with the same ``progress``. Of all
  ranks, the latest first answer came before the earliest question whose answer still was the same.

A standing is only given where nothing but another rank can let a thread continue (:mod:`horovod.core.lifecycle.standing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

SHOWN = 6
_CAUSES = (
    "They are called in another order, under other names, or by ranks that take different paths through the script."
)
_LONGEST_PAUSE_SECONDS = 10.0


class Submitted(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a rank has submitted, and that is not done there.

    Attributes:
        process_set: the number of the process set that agrees on it.
        name: identifies it there.
        ranks: the global ranks that take part; none: all ranks of the job.
        excusable: whether a rank that has joined takes part without submitting it.
        join: whether it is a ``join``, which ends once all ranks have joined.
        view: its description with the line that submitted it.
        awaited: whether a thread waits for it.
    """

    process_set: int
    name: str
    ranks: tuple[int, ...]
    excusable: bool
    join: bool
    view: str
    awaited: bool


class Expected(msgspec.Struct, frozen=True, array_like=True):
    """A message between two ranks that one of them has not sent, or not received.

    Attributes:
        ranks: the global ranks one of which has to send or receive it.
        view: its description with the line of the call that waits for that.
        awaited: whether a thread waits for it.
    """

    ranks: tuple[int, ...]
    view: str
    awaited: bool


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """A rank whose threads all wait.

    Attributes:
        progress: a number that is another one if anything has happened since.
        idle: for how many seconds all of its threads have waited.
        orders: by process set, how many collectives it has begun to carry out; the same on all ranks that have the same orders.
        submitted, expected: what is not done.
        sent, arrived: by global rank, how many parts of messages and answers were sent to it, and have arrived from it.
        doubtful: the lines of threads that may or may not wait. With any, the job is not ended.
        unconnected: the ranks to which it has messages that wait for a connection.
        listens: whether it takes connections for messages: not before its first message.
    """

    progress: int
    idle: float
    orders: dict[int, int] = {}
    submitted: list[Submitted] = []
    expected: list[Expected] = []
    sent: dict[int, int] = {}
    arrived: dict[int, int] = {}
    doubtful: list[str] = []
    unconnected: list[int] = []
    listens: bool = False


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Standing | None).decode


@dataclass(frozen=True)
class Deadlock:
    """What the proof has found.

    Attributes:
        text: the message.
        blamed: a rank that has not submitted what another waits for.
        name: the collective that lacks it.
        certain: whether the job can be ended. Otherwise some thread may still continue, and the text names it.
    """

    text: str
    blamed: int
    name: str
    certain: bool


@dataclass
class _Answers:
    """The answers of one rank with one standing: the time of the first, and when the last was asked for."""

    standing: Standing
    first: float
    asked: float
    since: float


class DeadlockDetector:
    """Looks for the proof in the answers of all ranks.

    Args:
        size: the number of ranks.
        seconds: for how long no rank may have continued before :meth:`found` says so.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._answers: dict[int, _Answers] = {}
        self._doubted: dict[int, int] = {}

    def take(self, rank: int, standing: Standing | None, asked: float, now: float) -> None:
        """Take the answer of a rank.

        Args:
            standing: None: a thread of the rank may continue by itself.
            asked: when it was asked. What it answers was true at some moment between ``asked`` and ``now``.
        """
        if standing is None:
            self._answers.pop(rank, None)
            return
        before = self._answers.get(rank)
        if before is not None and before.standing.progress == standing.progress:
            before.asked = max(before.asked, asked)
        else:
            self._answers[rank] = _Answers(standing, now, asked, now - standing.idle)

    def next_look(self, now: float) -> float | None:
        """When to ask all ranks again; None: not because of the answers so far."""
        if len(self._answers) < self._size:
            return None
        return now + min(max(self._seconds / 4, 0.1), _LONGEST_PAUSE_SECONDS)

    def found(self) -> Deadlock | None:
        """The deadlock, if it is proven and old enough. One that is not certain is returned once."""
        answers = self._answers
        if len(answers) < self._size:
            return None
        asked = min(each.asked for each in answers.values())
        seconds = asked - max(each.since for each in answers.values())
        if max(each.first for each in answers.values()) > asked or seconds < self._seconds:
            return None
        standings = {rank: answers[rank].standing for rank in sorted(answers)}
        lacking = _lacking(standings)
        if lacking is None:
            return None
        certain = not any(each.doubtful for each in standings.values())
        state = {rank: each.progress for rank, each in standings.items()}
        if not certain and self._doubted == state:
            return None
        self._doubted = state
        return _deadlock(standings, lacking, seconds, certain)


_Item = tuple[int, Submitted | Expected]


def _lacking(standings: Mapping[int, Standing]) -> list[tuple[_Item, list[int]]] | None:
    """What each rank waits for, with the ranks that have not done their part; None if anything lacks no rank."""
    having: dict[tuple[int, str], set[int]] = {}
    joined: dict[int, set[int]] = {}
    orders: dict[int, int] = {}
    for rank, standing in standings.items():
        for each in standing.submitted:
            if each.join:
                joined.setdefault(each.process_set, set()).add(rank)
            else:
                having.setdefault((each.process_set, each.name), set()).add(rank)
        for process_set, count in standing.orders.items():
            if orders.setdefault(process_set, count) != count:
                return None  # a rank has carried out what another has not begun
    found: list[tuple[_Item, list[int]]] = []
    for rank, standing in standings.items():
        if not any(one.awaited for one in standing.submitted) and not any(one.awaited for one in standing.expected):
            return None
        for one in standing.submitted:
            members = set(one.ranks or standings)
            there = joined[one.process_set] if one.join else having[one.process_set, one.name]
            excused = joined.get(one.process_set, set()) if one.excusable else set()
            missing = sorted(members - there - excused)
            if not missing:
                return None
            found.append(((rank, one), missing))
        found += [((rank, message), list(message.ranks)) for message in standing.expected]
        if any(standings[peer].arrived.get(rank, 0) != count for peer, count in standing.sent.items()):
            return None  # something is on its way
        if any(standings[peer].listens for peer in standing.unconnected):
            return None  # they are about to be connected
    return found


def _deadlock(
    standings: Mapping[int, Standing], lacking: Sequence[tuple[_Item, list[int]]], seconds: float, certain: bool
) -> Deadlock:
    grouped: dict[tuple[int, str], tuple[list[int], Submitted | Expected, list[int]]] = {}
    for (rank, item), missing in lacking:
        if item.awaited:
            key = (item.process_set, item.name) if isinstance(item, Submitted) else (-1 - rank, item.view)
            grouped.setdefault(key, ([], item, missing))[0].append(rank)
    lines = [
        f"No rank can continue: for {seconds:.0f} seconds every rank has waited for a collective that another rank has not "
        "called, and that rank waits, too:"
    ]
    shown = list(grouped.values())
    for ranks, item, missing in shown[:SHOWN]:
        where = f" (process set {item.process_set})" if isinstance(item, Submitted) and item.process_set else ""
        what = f"{item.name}{where}, submitted as {item.view}" if isinstance(item, Submitted) else item.view
        lines.append(
            f"{_ranks(ranks)}: {what}; {_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not called it"
        )
    if len(shown) > SHOWN:
        lines.append(f"... and {len(shown) - SHOWN} more")
    lines.append(_CAUSES)
    if not certain:
        lines.append("The job goes on, because these threads may still call it:")
        lines += [f"rank {rank}: {line}" for rank, each in standings.items() for line in each.doubtful][:SHOWN]
    _, first, missing = shown[0]
    return Deadlock("\n".join(lines), missing[0], first.name if isinstance(first, Submitted) else "", certain)


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"
