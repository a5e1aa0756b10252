"""The messages between the processes of an elastic job and their launcher, through the launcher's rendezvous server.

The launcher gives each process a number that never changes and is unique in the job. Ranks change from round to round. A round
is the rendezvous of certain processes in ``init()``, and the training that follows.

A process sends a message to the launcher with a ``Put`` under :func:`message_key`. The process asks for its rank in the next
round with :class:`ReadyForRound`, and waits for the answer with a ``Get`` of :func:`answer_key`. During a round, a thread of
each process waits for the launcher's messages with a ``Get`` of :func:`news_key`.
"""

from __future__ import annotations

from enum import IntFlag

import msgspec

MESSAGES = "elastic/message/"
"""The prefix of the keys under which processes send messages to the launcher. The server does not store them."""


class ReadyForRound(msgspec.Struct, tag=True, frozen=True):
    """A process waits in ``init()``, or before it, for its rank in the next round."""

    question: int
    """How many times the process has asked before."""
    round: int
    """The round that the process has left; 0 if it has been in none."""
    failed: bool = False
    """Whether the process has left that round because of a failure."""
    reason: str = ""
    final: bool = False
    """Whether another round would fail in the same way, so that the job ends."""
    has_state: bool = False
    """Whether the process has synchronised its state, and so has the state of the job. Other processes may lack it."""
    keeps_state: bool = False
    """Whether all ranks of that round have stopped at the same check as this one, with the same state, or have failed."""
    in_run: bool = False
    """Whether the process asks from ``hvd.elastic.run``; otherwise it asks from a call of ``init()`` in the script."""
    line: str = ""
    """The line of the script whose collective failed; "" if none did."""
    collective: str = ""
    """The operation and the name of the oldest collective that the failure has ended in this process; "" if there was none."""
    cut: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks of that round whose hosts cannot reach each other, so that it could not begin."""


class Connected(msgspec.Struct, tag=True, frozen=True):
    """``init()`` has succeeded in a process. A process that joins others sends it again when it enters ``hvd.elastic.run``."""

    round: int
    in_run: bool = False
    """Whether it has entered ``hvd.elastic.run``."""


class Returned(msgspec.Struct, tag=True, frozen=True):
    """``hvd.elastic.run`` has returned in a process."""

    round: int
    commits: int
    """How many commits and checks the process has made, in all rounds."""


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """The runtime of a process knows which rank of a round failed first."""

    round: int
    rank: int
    reason: str


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """A process has received SIGTERM. It leaves at the next check for changed hosts."""

    round: int


ENDING = "elastic/ending"
"""The launcher stores a value under this key when it ends the job. After that, a process that receives SIGTERM need not send
:class:`Leaving`."""

WorkerMessage = ReadyForRound | Connected | Returned | RankFailed | Leaving


class RankAssignment(msgspec.Struct, tag=True, frozen=True):
    """The process is a rank of this round."""

    round: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    same_state: bool = False
    """Whether all ranks of this round come from the same check of the round before. If not, all synchronise their states."""
    in_run: bool = False
    """Whether ranks of this round are in ``hvd.elastic.run``, so that the next collective of all is there."""
    lost: list[str] = []
    """The ranks that the job has gone on without, as text: the latest, in their order."""


class NoRank(msgspec.Struct, tag=True, frozen=True):
    """The process is not part of the next round."""

    reason: str
    job_ends: bool
    """Whether there is no next round. Otherwise the other processes continue, and this one exits with 0."""


Answer = RankAssignment | NoRank


class HostUpdateResult(IntFlag):
    """How the hosts have changed; two results are combined with ``|``."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsChanged(msgspec.Struct, tag=True, frozen=True):
    """Ranks can be added or must be removed: all ranks stop at the next check, and a new round begins."""

    result: int
    """A :class:`HostUpdateResult`."""


class RoundOver(msgspec.Struct, tag=True, frozen=True):
    """A rank of the round is lost. Ranks that are connecting to it stop waiting."""

    reason: str


News = HostsChanged | RoundOver


def message_key(process: int) -> str:
    return f"{MESSAGES}{process}"


def answer_key(process: int, question: int) -> str:
    return f"elastic/answer/{process}/{question}"


def news_key(round_number: int, number: int) -> str:
    """The key of message ``number``, counted from 0, to all processes of a round."""
    return f"elastic/news/{round_number}/{number}"


STORES = "elastic/store/"
"""The beginning of all keys of process groups."""


def store_prefix(round_number: int) -> str:
    """The beginning of the keys of the process groups of a round."""
    return f"{STORES}{round_number}/"


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_news = msgspec.msgpack.Decoder(News).decode
